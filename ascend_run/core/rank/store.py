"""The store of the ranks' rendezvous, served on one address only, or a client of it.

``TCPStore`` alone listens on every interface of the machine. Imports torch.
"""

from __future__ import annotations

import datetime
import errno
import ipaddress
import os
import socket
import time
from typing import Final, TypeAlias, cast

import psutil
from torch.distributed import TCPStore

Address: TypeAlias = tuple[str, int] | tuple[str, int, int, int]
"""Host and port; with IPv6 also flow info and scope id."""
_BACKLOG: Final = 2048
"""Number of ranks that may connect at the same time."""
_CONNECT_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.2
_LITERAL_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_NCCL_AND_HCCL: Final = ("NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")


def serve_store(host: str, port: int, timeout: datetime.timedelta) -> TCPStore:
    """Serve a store that listens on ``host`` only.

    Args:
        host: A name or an address of this machine.
        port: Port to listen on; 0 selects a free one, see ``store.port``.
        timeout: Timeout of the store's operations.

    Raises:
        OSError: ``host`` is unknown or not an address of this machine, or the port is in use.
    """
    listener = _listen(host, port)
    address, bound_port, *_ = listener.getsockname()
    return TCPStore(
        address,
        bound_port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def connect_store(host: str, port: int, timeout: datetime.timedelta) -> TCPStore:
    """Connect to the store at ``host``, once something listens there.

    Raises:
        OSError, DistNetworkError, DistStoreError: The store is not reachable within ``timeout``.
    """
    _wait_for_listener(host, port, timeout.total_seconds())
    return TCPStore(host, port, is_master=False, timeout=timeout)


def check_reachable(host: str) -> None:
    """Check that the name of this machine resolves to an address that others can reach.

    Raises:
        OSError: It resolves to a loopback address, or ``host`` is unknown.
    """
    if is_loopback_name(host):
        raise OSError(
            f"on this machine the name {host} resolves to a loopback address, which other machines "
            "cannot reach; give the address of its network interface instead of the name"
        )


def is_loopback_name(host: str) -> bool:
    """Return whether a name (not a literal loopback address) resolves to loopback only.

    Many systems resolve a machine's own name to 127.0.1.1.

    Raises:
        OSError: ``host`` is unknown.
    """
    return host not in _LITERAL_LOOPBACK and _is_loopback(host)


def address_towards(host: str) -> str:
    """Return this machine's address on the route to ``host``. Sends nothing.

    Raises:
        OSError: ``host`` is unknown, or there is no route to it.
    """
    family, address = _resolve(host, 9)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0]).partition("%")[0]


def interface_variables(host: str) -> dict[str, str]:
    """Return variables that bind the backends' sockets to the interface that routes to ``host``.

    Without them gloo listens on the address that the machine's name resolves to. NCCL and HCCL
    choose among several networks themselves; they are restricted only to loopback, on a single
    machine. Variables set by the user are kept.

    Raises:
        OSError: ``host`` is unknown, or there is no route to it.
    """
    own = address_towards(host)
    names = ("GLOO_SOCKET_IFNAME", *(_NCCL_AND_HCCL if _is_loopback(host) else ()))
    for interface, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == own for address in addresses):
            return {name: interface for name in names if name not in os.environ}
    return {}


def _is_loopback(host: str) -> bool:
    return all(_ip(address).is_loopback for _, address in _resolve(host, 0))


def _wait_for_listener(host: str, port: int, seconds: float) -> None:
    """Try to connect until it succeeds: no signal interrupts a ``TCPStore`` that tries.

    Raises:
        OSError: The last attempt's.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise OSError(
                    f"no store at {host}:{port} within {seconds:.0f} s: {error}"
                ) from error
            time.sleep(_POLL_SECONDS)
        else:
            return


def _listen(host: str, port: int) -> socket.socket:
    """Listen on the first address of ``host`` that belongs to this machine."""
    addresses = _resolve(host, port)
    for family, address in addresses:
        if _ip(address).is_unspecified:
            raise OSError(f"{host} binds every interface; use the address of one")
        try:
            return _listen_at(family, address)
        except OSError as error:
            is_last = (family, address) == addresses[-1]
            if is_last or error.errno != errno.EADDRNOTAVAIL:
                raise
    raise OSError(f"{host} has no address")


def _listen_at(family: int, address: Address) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _resolve(host: str, port: int) -> list[tuple[int, Address]]:
    """Resolve to unique (family, socket address) pairs: IPv4 first, loopback addresses last."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = dict.fromkeys(
        (int(family), cast("Address", address)) for family, _, _, _, address in found
    )
    return sorted(addresses, key=lambda one: (_ip(one[1]).is_loopback, one[0] != socket.AF_INET))


def _ip(address: Address) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(address[0].partition("%")[0])
