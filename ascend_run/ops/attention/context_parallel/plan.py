"""The plan of a context-parallel group for one attention. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

import attrs

from ascend_run.types.attention import SequencePartition
from ascend_run.types.layout import Layout

from .options import KvCacheOptions
from .partitions import Nested

KeysBy = Literal["heads", "ring", "gather", "mask"]
"""KV routing: in the all-to-all over heads, to ranks that then have the full sequence; by ring; by
all-gather; or to the ranks whose queries see the keys."""

WHOLE: Final = "cp"
"""The group of all ranks that share a sequence."""


@attrs.frozen(kw_only=True)
class ContextParallelPlan:
    """All-to-all over heads within groups of consecutive ranks, and routed keys between the groups.

    P ranks form groups of U. Within a group, each rank gets the group's part of the sequence and
    1 / U of the heads; for those, the P / U ranks at the same index of every group attend to each
    other's keys. With U = P no keys are routed; without an all-to-all the ring has all P ranks.
    """

    plugin: str
    """Name of the plugin; prefix of the process groups' names."""
    size: int
    """P."""
    partition: SequencePartition
    """Partition of the sequence among the P / U groups, if keys are routed between them."""
    keys: KeysBy
    head_degree: int | None = None
    """U; None: no all-to-all over heads."""
    window: int | None = None
    """Ranks of a ring that pass keys among themselves before they receive those of another window;
    None: all of them."""
    kv_cache: KvCacheOptions = attrs.field(factory=KvCacheOptions)
    """What is saved for backward of received keys and values."""
    gathers_heads: bool = False
    """Whether keys and values are all-gathered and not sent in the all-to-all over heads."""
    groups_at_once: int | None = None
    """Key-value heads that are gathered at a time; None: all."""

    @property
    def ring_degree(self) -> int:
        """P / U."""
        return self.size // (self.head_degree or 1)

    @property
    def rank_partition(self) -> SequencePartition:
        """The partition of the sequence among all P ranks."""
        if self.keys == "heads" or self.head_degree is None:
            return self.partition
        return Nested(self.partition, self.head_degree)

    @property
    def divides(self) -> bool:
        """Whether U divides P, and the window size divides the ring's."""
        fits = self.size % (self.head_degree or 1) == 0
        return fits and self.ring_degree % (self.window or 1) == 0

    @property
    def head_group(self) -> str:
        """Name of the groups of U consecutive ranks."""
        return WHOLE if self.keys == "heads" else f"{self._prefix}_heads"

    @property
    def key_groups(self) -> tuple[str, ...]:
        """Names of the groups of ranks that send each other keys; a ring with windows has one of
        the ranks of a window, and one of the ranks at the same index of every window."""
        if self.keys == "heads":
            return ()
        if self.head_degree is None and self.window is None:
            return (WHOLE,)
        if self.keys == "ring":
            return f"{self._prefix}_window", f"{self._prefix}_windows"
        return (f"{self._prefix}_keys",)

    @property
    def group_names(self) -> tuple[str, ...]:
        """Names of all groups that the kernel communicates over."""
        over_heads = self.keys == "heads" or self.head_degree is not None
        return (*([self.head_group] if over_heads else []), *self.key_groups)

    def rank_lists(self, layout: Layout) -> dict[str, list[tuple[int, ...]]]:
        """Return the plan's process groups in every context-parallel group; none if sizes do not
        divide."""
        if not self.divides:
            return {}
        names = [] if self.head_degree is None else [self.head_group]
        found: dict[str, list[tuple[int, ...]]] = {
            name: [] for name in (*names, *self.key_groups) if name != WHOLE
        }
        for ranks in layout.groups("cp"):
            for name, members in self._members(ranks):
                if name in found:
                    found[name].append(members)
        return found

    def _members(self, ranks: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
        degree, window = self.head_degree or 1, self.window or self.ring_degree
        for first in range(0, self.size, degree):
            yield self.head_group, ranks[first : first + degree]
        inside, *across = self.key_groups or ("",)
        for ring in (ranks[place::degree] for place in range(degree)):
            for first in range(0, len(ring), window):
                yield inside, ring[first : first + window]
            for name in across:
                yield from ((name, ring[place::window]) for place in range(window))

    @property
    def _prefix(self) -> str:
        return self.plugin.replace("-", "_")
