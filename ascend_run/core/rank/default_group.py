"""torch's default process group: ranks that meet at MASTER_ADDR, or this process alone.

Imports torch.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from ascend_run.plugin_api.errors import ConfigError
from ascend_run.types.layout import Layout

from .rank_environment import ATTEMPT_VARIABLE, RUN_ID_VARIABLE, spans_nodes
from .store import (
    check_reachable,
    connect_store,
    interface_variables,
    is_loopback_name,
    serve_store,
)

_LOOPBACK = "127.0.0.1"
_ADVICE = (
    "MASTER_ADDR must be the host of rank 0 as every rank reaches it, and MASTER_PORT a port that "
    "is free there; all ranks must start within run.timeout_seconds"
)


@contextmanager
def default_group(layout: Layout, backend: str, timeout: datetime.timedelta) -> Iterator[None]:
    """Create the group of all ranks and destroy it on exit; keep a group that already exists.

    The run's sockets listen on one interface only: the one that routes to ``MASTER_ADDR``, or the
    loopback interface for a single rank.

    Raises:
        ConfigError: The ranks cannot meet at the address in the environment.
    """
    if dist.is_initialized():
        yield
        return
    host = _LOOPBACK if layout.world_size == 1 else os.environ.get("MASTER_ADDR", "")
    with _meeting_errors(layout):
        # If a name resolves to loopback on one of several nodes, its interface is not shared.
        shared = not spans_nodes(os.environ, layout.world_size) or not is_loopback_name(host)
        variables = interface_variables(host) if shared else {}
    os.environ.update(variables)  # gloo reads them again for every group created later
    try:
        with _meeting_errors(layout):
            dist.init_process_group(
                backend,
                store=_store(layout, host, timeout),
                rank=layout.rank,
                world_size=layout.world_size,
                timeout=timeout,
            )
        yield
    finally:
        for name in variables:
            del os.environ[name]
        if dist.is_initialized():
            dist.destroy_process_group()


def store_of_attempt(store: dist.Store) -> dist.Store:
    """Return a prefix of the store that ranks of earlier attempts have not written to.

    torch's elastic agent keeps one store over all restarts. A rank that finds the address of a
    terminated rank cannot connect to it.
    """
    attempt = os.environ.get(ATTEMPT_VARIABLE) or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"{os.environ.get(RUN_ID_VARIABLE, '')} attempt {attempt}", store)


def _store(layout: Layout, host: str, timeout: datetime.timedelta) -> dist.Store:
    if layout.world_size == 1:
        return dist.HashStore()
    port = int(os.environ.get("MASTER_PORT", ""))
    is_served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by the launcher
    if layout.rank != 0 or is_served:
        return store_of_attempt(connect_store(host, port, timeout))
    if spans_nodes(os.environ, layout.world_size):
        check_reachable(host)
    return store_of_attempt(serve_store(host, port, timeout))


@contextmanager
def _meeting_errors(layout: Layout) -> Iterator[None]:
    try:
        yield
    except (dist.DistStoreError, dist.DistNetworkError, OSError, ValueError) as error:
        names = ("MASTER_ADDR", "MASTER_PORT")
        where = ", ".join(f"{name}={os.environ.get(name, '')}" for name in names)
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"rank {layout.rank} of {layout.world_size} cannot rendezvous at {where}",
            [reason, _ADVICE],
        ) from error
