"""Which rank plays which part: a pure function of the sizes, without torch.

The order is Megatron's default, ``tp-cp-ep-dp-pp`` (innermost first), with the experts' own grid
``expt_tp-ep-expt_dp-pp`` over the same ranks. Tested against Megatron's RankGenerator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import attrs

RankLists: TypeAlias = tuple[tuple[int, ...], ...]


def rank_lists(sizes: Mapping[str, int], axes: Sequence[str]) -> RankLists:
    """The groups of ranks that differ only in their coordinates along ``axes``.

    Args:
        sizes: Axis name -> size, innermost (fastest) axis first.
        axes: Axes along which the members of one group differ.
    """
    strides: dict[str, int] = {}
    stride = 1
    for axis, size in sizes.items():
        strides[axis] = stride
        stride *= size
    groups: dict[int, list[int]] = {}
    for rank in range(stride):
        origin = rank - sum(rank // strides[a] % sizes[a] * strides[a] for a in axes)
        groups.setdefault(origin, []).append(rank)
    return tuple(tuple(members) for members in groups.values())


@attrs.frozen(kw_only=True)
class Layout:
    """Sizes of every parallel axis of a run, and this process's rank."""

    world_size: int = 1
    rank: int = 0
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    expt_tp: int = 1
    vpp: int | None = None

    @property
    def dp(self) -> int:
        """Data-parallel size of the dense parameters."""
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def expt_dp(self) -> int:
        """Data-parallel size of the experts."""
        return self.world_size // (self.expt_tp * self.pp * self.ep)

    @property
    def dense_axes(self) -> dict[str, int]:
        """Axes of the dense parameters' grid, innermost first."""
        return {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}

    @property
    def expert_axes(self) -> dict[str, int]:
        """Axes of the experts' grid, innermost first."""
        return {"expt_tp": self.expt_tp, "ep": self.ep, "expt_dp": self.expt_dp, "pp": self.pp}

    def groups(self, *axes: str) -> RankLists:
        """Rank lists of the groups along one or more axes of one grid."""
        grid = self.dense_axes if set(axes) <= set(self.dense_axes) else self.expert_axes
        return rank_lists(grid, axes)

    def coordinate(self, axis: str, rank: int | None = None) -> int:
        """Position of a rank (default: this one) along one axis."""
        own = self.rank if rank is None else rank
        stride, size = self._steps()[axis]
        return own // stride % size

    def places(self, *axes: str) -> Iterator[dict[str, int]]:
        """Every rank's position along each of these axes, rank by rank."""
        steps = self._steps()
        chosen = [(axis, *steps[axis]) for axis in axes]
        for rank in range(self.world_size):
            yield {axis: rank // stride % size for axis, stride, size in chosen}

    def _steps(self) -> dict[str, tuple[int, int]]:
        """Axis -> ranks from one position to the next, and positions; ``pp``, which stands in both
        grids, is the same in both."""
        steps: dict[str, tuple[int, int]] = {}
        for grid in (self.expert_axes, self.dense_axes):
            stride = 1
            for axis, size in grid.items():
                steps[axis] = (stride, size)
                stride *= size
        return steps

    def divides(self) -> bool:
        """Whether the world splits evenly into both grids."""
        dense = self.tp * self.pp * self.cp
        expert = self.expt_tp * self.pp * self.ep
        return self.world_size % math.lcm(dense, expert) == 0
