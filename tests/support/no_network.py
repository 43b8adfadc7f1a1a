"""No connection leaves this machine."""

from __future__ import annotations

import socket
from typing import Any

import pytest


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail at a connection to any other address than this machine's own, and at a name of one."""
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, _local(getattr(socket.socket, name), name))
    monkeypatch.setattr(socket, "getaddrinfo", _resolving(socket.getaddrinfo))


def _local(call: Any, name: str) -> Any:
    def checked(self: socket.socket, address: Any) -> Any:
        if self.family != socket.AF_UNIX:
            assert address[0] in ("127.0.0.1", "::1"), f"{name} to {address}"
        return call(self, address)

    return checked


def _resolving(call: Any) -> Any:
    def checked(host: Any, *rest: Any, **options: Any) -> Any:
        assert host in (None, "", "localhost", "127.0.0.1", "::1"), f"the name {host} is looked up"
        return call(host, *rest, **options)

    return checked
