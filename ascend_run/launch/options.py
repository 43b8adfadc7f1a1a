"""Launch options: how many ranks to start here, and where the nodes meet."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import attrs

from ascend_run.plugin_api.errors import ConfigError

from .rendezvous_key import RendezvousKey


def _as_path(value: str | Path | None) -> Path | None:
    return None if value is None else Path(value)


@attrs.frozen(kw_only=True)
class LaunchOptions:
    """Launch options of the command line.

    Raises:
        ConfigError: The options contradict each other; lists all problems.
    """

    nproc: int = 1
    """Ranks on this machine."""
    nnodes: int = 1
    """Number of nodes; each runs the same command."""
    node_rank: int | None = None
    """Rank of this node; None assigns ranks in order of arrival."""
    rdzv_endpoint: str | None = None
    """Rendezvous address, ``host:port``."""
    rdzv_key_file: Path | None = attrs.field(default=None, converter=_as_path)
    """File with the secret that authenticates the nodes to each other."""
    max_restarts: int = 0
    """How often all ranks are restarted after a failure."""
    grace_seconds: int = 10
    """Time between SIGTERM and SIGKILL."""
    join_seconds: int = 900
    """How long to wait for the other nodes."""

    def __attrs_post_init__(self) -> None:
        if problems := list(self._problems()):
            raise ConfigError("the ranks cannot be started", problems)

    @property
    def world_size(self) -> int:
        return self.nproc * self.nnodes

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port of ``rdzv_endpoint``. Requires several nodes."""
        host, _, port = (self.rdzv_endpoint or "").rpartition(":")
        return host.strip("[]"), int(port)

    def read_key(self) -> RendezvousKey:
        """Return the secret of ``rdzv_key_file``. Requires several nodes.

        Raises:
            ValueError: The file has no usable key.
        """
        assert self.rdzv_key_file is not None
        return RendezvousKey.read(self.rdzv_key_file)

    def _problems(self) -> Iterator[str]:
        endpoint, key_file = self.rdzv_endpoint, self.rdzv_key_file
        if self.nnodes > 1 and endpoint is None:
            yield f"--nnodes {self.nnodes} needs --rdzv-endpoint HOST:PORT, the same on each node"
        if self.nnodes == 1 and endpoint is not None:
            yield f"--rdzv-endpoint {endpoint} needs --nnodes above 1; leave it out"
        if self.nnodes > 1 and key_file is None:
            yield (
                f"--nnodes {self.nnodes} needs --rdzv-key-file FILE, a secret that every node has "
                "a copy of; make one with: (umask 077; openssl rand -hex 32 > rdzv.key)"
            )
        if self.nnodes == 1 and key_file is not None:
            yield f"--rdzv-key-file {key_file} needs --nnodes above 1; leave it out"
        if self.nnodes > 1 and key_file is not None:
            try:
                self.read_key()
            except ValueError as error:
                yield f"--rdzv-key-file {error}"
        if endpoint is not None and not (
            re.fullmatch(r"[^/\s]+:\d{1,5}", endpoint) and 0 < self.endpoint[1] < 2**16
        ):
            yield f"--rdzv-endpoint {endpoint}: expected HOST:PORT, a port from 1 to 65535"
        if self.node_rank is not None and not 0 <= self.node_rank < self.nnodes:
            yield f"--node-rank {self.node_rank} must be from 0 to {self.nnodes - 1}"
