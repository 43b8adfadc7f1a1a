"""Ranks that cannot meet where their starter says: one message, and what must be so."""

from __future__ import annotations

import datetime
import socket
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from ascend_run.core.rank.default_group import default_group, store_of_attempt
from ascend_run.core.rank.store import interface_variables, serve_store
from ascend_run.plugin_api import ConfigError, Layout


@pytest.fixture
def busy_port() -> Iterator[int]:
    """One on which something else listens."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_a_port_that_is_taken_is_one_message(
    monkeypatch: pytest.MonkeyPatch, busy_port: int
) -> None:
    refusal = refusal_at(monkeypatch, "127.0.0.1", str(busy_port), rank=0)
    assert refusal.headline == (
        f"rank 0 of 2 cannot rendezvous at MASTER_ADDR=127.0.0.1, MASTER_PORT={busy_port}"
    )
    assert "a port that is free there" in refusal.problems[1]


def test_an_unreachable_port_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = refusal_at(monkeypatch, "127.0.0.1", "9", rank=1)
    assert refusal.headline.startswith("rank 1 of 2 cannot rendezvous at")


def test_a_host_that_is_not_there_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = refusal_at(monkeypatch, "no-such-host.invalid", "29555", rank=1)
    assert "MASTER_ADDR=no-such-host.invalid" in refusal.headline
    assert "\n" not in "".join(refusal.problems)


def test_a_port_that_is_no_number_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "MASTER_PORT=http" in refusal_at(monkeypatch, "127.0.0.1", "http", rank=1).headline


def test_a_name_that_is_loopback_here_is_refused_over_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As 127.0.1.1 is on Debian: only ranks on this machine could connect."""
    result = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 29500))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: result)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    refusal = refusal_at(monkeypatch, "node-0", "29500", rank=0)
    assert "the name node-0 resolves to a loopback address" in refusal.problems[0]


def test_a_store_is_served_on_an_address_of_this_machine_only() -> None:
    with pytest.raises(OSError, match="Cannot assign requested address"):
        serve_store("203.0.113.1", 0, datetime.timedelta(seconds=2))  # for documentation only


def test_a_store_is_not_served_on_every_interface() -> None:
    for host in ("0.0.0.0", "::"):
        with pytest.raises(OSError, match="binds every interface"):
            serve_store(host, 0, datetime.timedelta(seconds=2))


def test_the_first_address_that_is_of_this_machine_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    addresses = ["203.0.113.9", "127.0.0.1"]
    result = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, 0)) for ip in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: result)
    store = serve_store("node-0", 0, datetime.timedelta(seconds=2))
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", store.port)) == 0


@pytest.mark.parametrize("given", [None, "eth7"])
def test_gloo_is_bound_to_the_loopback_interface_unless_the_user_says(
    monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", given)
    variables = interface_variables("127.0.0.1")
    assert variables.pop("GLOO_SOCKET_IFNAME", None) == (None if given else "lo")
    assert variables == {"NCCL_SOCKET_IFNAME": "lo", "HCCL_SOCKET_IFNAME": "lo"}


def refusal_at(monkeypatch: pytest.MonkeyPatch, address: str, port: str, rank: int) -> ConfigError:
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", port)
    layout = Layout(world_size=2, rank=rank)
    seconds = datetime.timedelta(seconds=2)
    with pytest.raises(ConfigError) as refused, default_group(layout, "gloo", seconds):
        pass
    assert not dist.is_initialized()
    return refused.value


def test_restarted_ranks_do_not_read_the_store_of_the_first_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = dist.HashStore()
    for variable in ("ASCEND_RUN_ATTEMPT", "TORCHELASTIC_RESTART_COUNT"):
        for attempt in ("0", "1"):
            monkeypatch.setenv(variable, attempt)
            own = store_of_attempt(store)
            assert not own.check(["address"])
            own.set("address", attempt)
        monkeypatch.delenv(variable)
        store = dist.HashStore()
