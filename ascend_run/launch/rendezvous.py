"""Rendezvous of the launchers: torch's, but on one address only and authenticated by a key.

torch's own rendezvous listens on every interface and unpickles the state in its store, so anyone
who reaches the port can run code in every launcher. Imports torch.
"""

from __future__ import annotations

import datetime
import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch.distributed import DistNetworkError, DistStoreError, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStateError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
    Token,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from ascend_run.core.rank.store import (
    address_towards,
    check_reachable,
    connect_store,
    serve_store,
)

from .options import LaunchOptions
from .rendezvous_key import RendezvousKey

LOOPBACK: Final = "127.0.0.1"
_READ_TIMEOUT: Final = datetime.timedelta(seconds=60)
_POLL_SECONDS: Final = 0.1


def rendezvous_of(options: LaunchOptions) -> tuple[RendezvousHandler, str]:
    """Build the rendezvous of the nodes.

    Returns:
        The handler, and the address at which other nodes reach this one.

    Raises:
        RendezvousError: The nodes cannot meet there.
    """
    if options.nnodes == 1:
        store, key = serve_store(LOOPBACK, 0, _READ_TIMEOUT), RendezvousKey.random()
        return _dynamic(store, key, LOOPBACK, options), LOOPBACK
    key, (host, port) = options.read_key(), options.endpoint
    with _as_rendezvous_error():
        check_reachable(host)
        address = address_towards(host)
        if options.node_rank is not None:
            return _static(host, port, key, options), address
        return _dynamic(_store_of_any_node(host, port), key, address, options), address


class AuthenticatedBackend(RendezvousBackend):
    """Store the rendezvous state with an HMAC, and return it only if the HMAC is valid.

    The handler unpickles what it gets from the backend.
    """

    def __init__(self, backend: RendezvousBackend, key: RendezvousKey) -> None:
        self._backend = backend
        self._key = key

    @property
    def name(self) -> str:
        """See base class."""
        return self._backend.name

    def get_state(self) -> tuple[bytes, Token] | None:
        """See base class."""
        found = self._backend.get_state()
        return None if found is None else (self._open(found[0]), found[1])

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """See base class."""
        found = self._backend.set_state(self._key.seal(state), token)
        return None if found is None else (self._open(found[0]), *found[1:])

    def _open(self, sealed: bytes) -> bytes:
        try:
            return self._key.open(sealed)
        except ValueError as error:
            raise RendezvousStateError(
                f"something else has written to the rendezvous store: {error}"
            ) from None


class _DynamicRendezvous(DynamicRendezvousHandler):
    """Node ranks in order of arrival. Its store for the ranks listens on one address, too."""

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> TCPStore:
        return serve_store(master_addr, master_port, _READ_TIMEOUT)


class _StaticRendezvous(StaticTCPRendezvous):
    """Node ranks given by the user. Node 0 serves the store."""

    def __init__(self, key: RendezvousKey, **arguments: Any) -> None:
        super().__init__(run_id=key.run_id(), **arguments)
        self._key = key

    def next_rendezvous(self) -> RendezvousInfo:
        """See base class.

        Raises:
            RendezvousError: Not all nodes have come in time, or their keys differ.
        """
        if self._store is None:
            join = serve_store if self.rank == 0 else connect_store
            with _as_rendezvous_error():
                self._store = join(self.master_addr, self.master_port, self.timeout)
                _check_key(self._store, self._key)
                self._wait_for_nodes(self._store)
        return super().next_rendezvous()

    def _wait_for_nodes(self, store: Store) -> None:
        """Poll, since no signal interrupts a store that waits: what the agent reads of the others
        next is then there, or soon will be."""
        seconds = self.timeout.total_seconds()
        deadline = time.monotonic() + seconds
        store.set(_arrival(self.rank), "")
        missing = list(range(self.world_size))
        while missing := [rank for rank in missing if not store.check([_arrival(rank)])]:
            if time.monotonic() > deadline:
                absent = ", ".join(map(str, missing))
                raise RendezvousError(
                    f"after {seconds:.0f} s these of {self.world_size} nodes have not come: "
                    f"{absent}; start them with --node-rank"
                )
            time.sleep(_POLL_SECONDS)


def _arrival(node_rank: int) -> str:
    return f"ascend-run node {node_rank}"


def _static(host: str, port: int, key: RendezvousKey, options: LaunchOptions) -> RendezvousHandler:
    return _StaticRendezvous(
        master_addr=host,
        master_port=port,
        rank=options.node_rank,
        world_size=options.nnodes,
        key=key,
        timeout=options.join_seconds,
    )


def _dynamic(
    store: Store, key: RendezvousKey, address: str, options: LaunchOptions
) -> RendezvousHandler:
    _check_key(store, key)
    seconds = datetime.timedelta(seconds=options.join_seconds)
    handler: RendezvousHandler = _DynamicRendezvous.from_backend(
        run_id=key.run_id(),
        store=store,
        backend=AuthenticatedBackend(C10dRendezvousBackend(store, key.run_id()), key),
        min_nodes=options.nnodes,
        max_nodes=options.nnodes,
        local_addr=address,
        timeout=RendezvousTimeout(join=seconds),
    )
    return handler


def _store_of_any_node(host: str, port: int) -> TCPStore:
    """Serve the store if ``host`` is this machine and it is not served yet; else connect to it."""
    try:
        return serve_store(host, port, _READ_TIMEOUT)
    except OSError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            raise
    return connect_store(host, port, _READ_TIMEOUT)


def _check_key(store: Store, key: RendezvousKey) -> None:
    """Check that all nodes have the same key.

    Raises:
        RendezvousError: The nodes that arrived earlier have a different key.
    """
    proof = key.seal(b"").hex()
    if store.compare_set("ascend-run key", "", proof) != proof.encode():
        raise RendezvousError("the nodes have different keys: --rdzv-key-file must be the same")


@contextmanager
def _as_rendezvous_error() -> Iterator[None]:
    try:
        yield
    except (OSError, DistNetworkError, DistStoreError) as error:
        raise RendezvousError(str(error).partition("\n")[0]) from error
