"""Coordinates and process groups of ranks: a pure function of the parallel sizes, without torch.

The order is Megatron's default, ``tp-cp-ep-dp-pp`` (innermost first), with the experts' own grid
``expt_tp-ep-expt_dp-pp`` over the same ranks. Tested against Megatron's RankGenerator.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import attrs

RankLists: TypeAlias = tuple[tuple[int, ...], ...]

AXIS_KEYS: Final[Mapping[str, str]] = {
    "tp": "parallel.tensor_model_parallel_size",
    "pp": "parallel.pipeline_model_parallel_size",
    "vpp": "parallel.virtual_pipeline_model_parallel_size",
    "cp": "parallel.context_parallel_size",
    "ep": "parallel.expert_model_parallel_size",
    "expt_tp": "parallel.expert_tensor_parallel_size",
}
"""Axis -> the config key of its size; ``dp`` follows from the number of ranks."""


def world_size(sizes: Mapping[str, int]) -> int:
    """Return the number of ranks of a layout. Missing axes are 1; expert axes add no ranks."""
    return math.prod(sizes.get(axis, 1) for axis in ("tp", "cp", "pp", "dp"))


def axis_settings(sizes: Mapping[str, int]) -> dict[str, object]:
    """Return config key -> size for the given axes, except ``dp``."""
    return {AXIS_KEYS[axis]: size for axis, size in sizes.items() if axis in AXIS_KEYS}


def rank_lists(sizes: Mapping[str, int], axes: Sequence[str]) -> RankLists:
    """Return the groups of ranks that differ only in their coordinates along ``axes``.

    Args:
        sizes: Axis name -> size, innermost (fastest) axis first.
        axes: Axes along which the members of one group differ.
    """
    moved = [step for axis, step in _steps(sizes).items() if axis in axes]
    groups: dict[int, list[int]] = {}
    for rank in range(math.prod(sizes.values())):
        origin = rank - sum(rank // stride % size * stride for stride, size in moved)
        groups.setdefault(origin, []).append(rank)
    return tuple(tuple(members) for members in groups.values())


def _steps(sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Axis -> (stride, size)."""
    strides = itertools.accumulate(sizes.values(), operator.mul, initial=1)
    return {
        axis: (stride, size) for (axis, size), stride in zip(sizes.items(), strides, strict=False)
    }


@attrs.frozen(kw_only=True)
class Layout:
    """Sizes of every parallel axis of a run, and this process's rank."""

    world_size: int = 1  #: Ranks in all.
    rank: int = 0  #: This process, from 0.
    tp: int = 1  #: Tensor-parallel ranks.
    pp: int = 1  #: Pipeline stages.
    cp: int = 1  #: Context-parallel ranks.
    ep: int = 1  #: Expert-parallel ranks.
    expt_tp: int = 1  #: Tensor-parallel ranks of an expert.
    vpp: int | None = None  #: Virtual stages in each pipeline stage; None: not interleaved.

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
        """Return the rank lists of the groups along one or more axes of one grid."""
        grid = self.dense_axes if set(axes) <= set(self.dense_axes) else self.expert_axes
        return rank_lists(grid, axes)

    def coordinate(self, axis: str, rank: int | None = None) -> int:
        """Return the coordinate of a rank (default: this one) along one axis."""
        own = self.rank if rank is None else rank
        stride, size = self._steps()[axis]
        return own // stride % size

    def coordinates(self, *axes: str) -> Iterator[dict[str, int]]:
        """Yield every rank's coordinates along these axes, in rank order."""
        steps = self._steps()
        chosen = [(axis, *steps[axis]) for axis in axes]
        for rank in range(self.world_size):
            yield {axis: rank // stride % size for axis, stride, size in chosen}

    def _steps(self) -> dict[str, tuple[int, int]]:
        """Axis -> (stride, size), for the axes of both grids; ``pp`` is the same in both."""
        return _steps(self.expert_axes) | _steps(self.dense_axes)
