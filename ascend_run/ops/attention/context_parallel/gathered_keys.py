"""All-gathered keys and values and their reduce-scattered gradients, one part of the heads at a
time."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.transfer.gathering import (
    AllGatherWork,
    ReduceScatterWork,
    start_all_gather,
    start_reduce_scatter,
)
from ascend_run.ops.transfer.ring import Packing

from .gathered_blocks import Source
from .options import KvCache
from .route import Shape
from .sums import sum_dtype

# P ranks; s positions of one rank; B micro-batch; g key-value heads of a part; D width of k, E of v


class GatheredKeys:
    """All-gathers keys and values by part; receiving a part starts the next all-gather.

    Args:
        own: For each part, this rank's keys and values, [s, B, g, D] and [s, B, g, E], without
            those that were saved.
        kept: For each part, what ``keep`` returned after it.
        shapes: For each part, the shapes of the saved keys and values.
    """

    def __init__(
        self,
        own: Sequence[Sequence[Tensor]],
        group: dist.ProcessGroup,
        *,
        kept: Sequence[Tensor] = (),
        shapes: Sequence[Sequence[Shape]] = (),
    ) -> None:
        self._own, self._group = own, group
        packings = [Packing(of_part) for of_part in shapes]
        self._kept = [
            [packing.views(row) for row in rows]
            for packing, rows in zip(packings, kept, strict=True)
        ]
        self._part = 0
        self._received: Tensor | None = None
        self._gathering = self._start_gather(0)

    def own(self, part: int) -> list[Tensor]:
        """Return this rank's keys and values of a part."""
        kept = self._kept[part][self._group.rank()] if self._kept else []
        return [*kept, *self._own[part]]

    def all(self, part: int) -> list[list[Tensor]]:
        """Return keys and values of each rank; call it for the parts in order."""
        found = self._kept[part] if self._kept else [[] for _ in range(self._group.size())]
        if self._gathering is None:
            return found
        packing, self._part, self._received = self._gathering.packing, part, self._gathering.wait()
        self._gathering = self._start_gather(part + 1)
        return [[*a, *packing.views(b)] for a, b in zip(found, self._received, strict=True)]

    def keep(self, kv_cache: KvCache) -> list[Tensor]:
        """Return what backward needs of the last received part: at most one tensor [P,
        elements]."""
        if kv_cache == "none":
            return []
        assert self._received is not None
        if kv_cache == "full":
            return [self._received]
        keys, _ = self._own[self._part]
        return [self._received[:, : keys.numel()].clone()]

    def _start_gather(self, part: int) -> AllGatherWork | None:
        if part == len(self._own) or not self._own[part]:
            return None
        return start_all_gather(self._own[part], self._group)


class GatheredSums:
    """Gradients of all ranks' keys and values; reducing one part overlaps with computing the
    next."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._reducing: tuple[Packing, ReduceScatterWork] | None = None
        self._reduced: list[list[Tensor]] = []

    def begin(self, shapes: Sequence[Shape], like: Tensor) -> None:
        """Start a part, given the shapes of one rank's keys and values."""
        self._packing = Packing(shapes)
        numbers = (self._group.size(), self._packing.numel)
        self._sums = like.new_zeros(numbers, dtype=sum_dtype(like))
        self._of_rank = [self._packing.views(row) for row in self._sums]

    def add(self, sources: Sequence[Source], dk: Tensor, dv: Tensor) -> None:
        """Accumulate the gradients of a block's keys, the concatenation of the sources."""
        offset = 0
        for source in sources:
            length = source.end - source.start
            for sums, gradient in zip(self._of_rank[source.rank], (dk, dv), strict=True):
                sums[source.rows].add_(gradient[offset : offset + length])
            offset += length

    def send(self) -> None:
        """Start the reduce-scatter of the completed part."""
        self._finish()
        self._reducing = self._packing, start_reduce_scatter(self._sums, self._group)

    def result(self) -> list[list[Tensor]]:
        """Return the gradients of this rank's keys and of its values, for each part."""
        self._finish()
        return self._reduced

    def _finish(self) -> None:
        if self._reducing is not None:
            packing, work = self._reducing
            self._reduced.append(packing.views(work.wait()))
            self._reducing = None
