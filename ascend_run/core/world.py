"""This process's place among the ranks, as the launcher's environment tells it."""

from __future__ import annotations

import os
from collections.abc import Mapping

import attrs


@attrs.frozen
class World:
    """Rank and size of the whole run, and the rank on this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> World:
        """From ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK``; alone where they are not set."""
        return cls(
            rank=int(environment.get("RANK", 0)),
            size=int(environment.get("WORLD_SIZE", 1)),
            local_rank=int(environment.get("LOCAL_RANK", 0)),
        )
