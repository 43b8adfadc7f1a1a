"""How many ranks to start here, and how machines find one another."""

from __future__ import annotations

import re
from collections.abc import Iterator

import attrs

from ascend_run.plugin_api.errors import ConfigError


@attrs.frozen(kw_only=True)
class LaunchOptions:
    """What the command line says of ranks.

    Raises:
        ConfigError: The options contradict one another; all problems at once.
    """

    nproc: int = 1
    """Ranks on this machine."""
    nnodes: int = 1
    """Machines, each of which runs this same command."""
    node_rank: int | None = None
    """This machine's place among them; None: as they come."""
    rdzv_endpoint: str | None = None
    """``host:port`` at which they meet."""
    max_restarts: int = 0
    """How often all ranks are started again after one has failed."""
    grace_seconds: int = 10
    """Between SIGTERM and SIGKILL."""
    join_seconds: int = 900
    """How long to wait for the other machines."""

    def __attrs_post_init__(self) -> None:
        if problems := list(self._problems()):
            raise ConfigError("the ranks cannot be started", problems)

    @property
    def world_size(self) -> int:
        return self.nproc * self.nnodes

    def _problems(self) -> Iterator[str]:
        endpoint = self.rdzv_endpoint
        if self.nnodes > 1 and endpoint is None:
            yield f"--nnodes {self.nnodes} needs --rdzv-endpoint HOST:PORT, the same on each node"
        if self.nnodes == 1 and endpoint is not None:
            yield f"--rdzv-endpoint {endpoint} needs --nnodes above 1; leave it out"
        if endpoint is not None and not re.fullmatch(r".+:\d{1,5}", endpoint):
            yield f"--rdzv-endpoint {endpoint}: expected HOST:PORT"
        if self.node_rank is not None and not 0 <= self.node_rank < self.nnodes:
            yield f"--node-rank {self.node_rank} must be from 0 to {self.nnodes - 1}"
