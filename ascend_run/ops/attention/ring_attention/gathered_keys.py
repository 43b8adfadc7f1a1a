"""Keys and values of all ranks and their gradients, one part of the heads after the other."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.attention.kv_cache import KvCache
from ascend_run.ops.transfer.gathering import Gathering, Summing, gather, sum_home
from ascend_run.ops.transfer.ring import Packing

from .gathered_blocks import Source
from .sums import sum_dtype

# P ranks; s positions of one; B micro-batch; g key-value heads of a part; D width of k, E of v

Shape = tuple[int, ...]


class GatheredKeys:
    """A rank's own at once; the others' when they have come, and then the next part's set out.

    Args:
        own: Of each part, this rank's keys and values, [s, B, g, D] and [s, B, g, E], without those
            that were kept.
        kept: Of each part, what ``keep`` gave after it.
        shapes: Of each part, those of keys and of values, as far as they were kept.
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
        self._coming = self._sent_for(0)

    def own(self, part: int) -> list[Tensor]:
        """Keys and values."""
        kept = self._kept[part][self._group.rank()] if self._kept else []
        return [*kept, *self._own[part]]

    def all(self, part: int) -> list[list[Tensor]]:
        """Of each rank, keys and values; the parts are asked for in turn."""
        found = self._kept[part] if self._kept else [[] for _ in range(self._group.size())]
        if self._coming is None:
            return found
        packing, self._part, self._received = self._coming.packing, part, self._coming.wait()
        self._coming = self._sent_for(part + 1)
        return [[*a, *packing.views(b)] for a, b in zip(found, self._received, strict=True)]

    def keep(self, kv_cache: KvCache) -> list[Tensor]:
        """What backward shall have of the part that came last: at most one tensor [P, numbers]."""
        if kv_cache == "none":
            return []
        assert self._received is not None
        if kv_cache == "full":
            return [self._received]
        keys, _ = self._own[self._part]
        return [self._received[:, : keys.numel()].clone()]

    def _sent_for(self, part: int) -> Gathering | None:
        if part == len(self._own) or not self._own[part]:
            return None
        return gather(self._own[part], self._group)


class GatheredSums:
    """The gradients of all ranks' keys and values; a part's go home while the next is computed."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._going: tuple[Packing, Summing] | None = None
        self._home: list[list[Tensor]] = []

    def begin(self, shapes: Sequence[Shape], like: Tensor) -> None:
        """A part: the shapes of its keys and of its values, of one rank."""
        self._packing = Packing(shapes)
        numbers = (self._group.size(), self._packing.numel)
        self._sums = like.new_zeros(numbers, dtype=sum_dtype(like))
        self._of_rank = [self._packing.views(row) for row in self._sums]

    def add(self, sources: Sequence[Source], dk: Tensor, dv: Tensor) -> None:
        """The gradients of a block's keys, which lie in these places one after the other."""
        place = 0
        for source in sources:
            length = source.end - source.start
            for sums, gradient in zip(self._of_rank[source.rank], (dk, dv), strict=True):
                sums[source.rows].add_(gradient[place : place + length])
            place += length

    def send(self) -> None:
        """The part is complete."""
        self._arrive()
        self._going = self._packing, sum_home(self._sums, self._group)

    def result(self) -> tuple[list[Tensor], list[Tensor]]:
        """Of this rank's keys and of its values, part by part."""
        self._arrive()
        keys, values = zip(*self._home, strict=True)
        return [*keys], [*values]

    def _arrive(self) -> None:
        if self._going is not None:
            packing, summing = self._going
            self._home.append(packing.views(summing.wait()))
            self._going = None
