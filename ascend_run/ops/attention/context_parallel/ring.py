"""The route by ring: keys and values circulate among the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.transfer.ring import Packing, SendReceiveWork, pass_on
from ascend_run.types.attention import Mask, SequencePartition, partition_of

from .blocks import holder, ring_steps
from .options import KvCache
from .route import RankKeys, RoutedBlock, routed_blocks
from .schedule import Schedule, Step
from .sums import KeySums

# W ranks of one window

_GRADIENTS: Final = 1
"""The tag of the ring of gradients, which overlaps with that of keys and values."""

_MAX_BLOCKS: Final = 2**16
"""Per step; up to one block per document."""


class RingRoute:
    """A route.KeyRoute that sends keys and values to the next rank while computing with them.

    Forward: a rank receives the keys of the previous rank in its window while it computes; those
    that it holds first in a window are sent to the next window meanwhile, overlapped with the whole
    window. Backward circulates in reverse, starting with the keys held last. Within a window, the
    gradients of a block of keys follow it one step behind, and end on the rank that held it first;
    from there they are sent to the next window while that one accumulates its own. So both reach
    their owner at the last step.

    Args:
        group: The ranks of one window, which hold consecutive parts of the sequence.
        windows: The ranks at the same index of every window; None with a single window, the plain
            ring.
        kv_cache: ``none``: the last step's keys and values are saved, and circulate again;
            ``half``: the keys of every step are saved, and the values circulate; ``full``: all are
            saved, and nothing circulates.

    Source: arXiv:2310.01889; windows: arXiv:2406.18485; a backward that starts where forward ended
    is MindSpeed's. Gradients that cross windows once, and not at every step, are an addition of
    ascend-run.
    """

    reads: frozenset[str] = frozenset()
    groups_at_once: int | None = None

    def __init__(
        self,
        group: dist.ProcessGroup,
        partition: SequencePartition,
        *,
        windows: dist.ProcessGroup | None = None,
        kv_cache: KvCache = "none",
    ) -> None:
        self.group, self.windows = group, windows
        self.partition, self.kv_cache = partition, kv_cache
        self.rank, self.size = group.rank(), group.size()
        if windows is not None:
            self.rank += windows.rank() * group.size()
            self.size *= windows.size()
        self.max_blocks = self.size * _MAX_BLOCKS

    def work(self, mask: Mask, num_queries: int, num_keys: int, placed: bool) -> Schedule:
        lengths, window = (num_queries, num_keys), self.group.size()
        partition = partition_of(self.partition, mask.document_ends)
        blocks = ring_steps(mask, self.partition, *lengths, self.rank, self.size, window, placed)
        holders = (holder(self.rank, i, self.size, window) for i in range(len(blocks)))
        keys = (tuple(partition.chunks(num_keys, rank, self.size)) for rank in holders)
        return Schedule(
            queries=tuple(partition.chunks(num_queries, self.rank, self.size)),
            steps=tuple(Step(keys=k, blocks=b) for k, b in zip(keys, blocks, strict=True)),
        )

    def forward(self, work: Schedule, keys: RankKeys) -> Iterator[Iterator[RoutedBlock]]:
        yield self._forward(work.steps, keys)

    def backward(self, work: Schedule, keys: RankKeys) -> Iterator[Iterator[RoutedBlock]]:
        yield self._backward(work.steps, keys)

    def _forward(self, steps: Sequence[Step], keys: RankKeys) -> Iterator[RoutedBlock]:
        packing, num_keys = Packing(keys.shapes[0]), keys.own[0][0].numel()
        circulated = self._circulated(packing.pack([*keys.own[0]]), len(steps))
        for number, (step, held) in enumerate(zip(steps, circulated, strict=True)):
            if self.kv_cache == "full":
                keys.saved.append(held)
            elif self.kv_cache == "half":
                keys.saved.append(held[:num_keys].clone())
            sums = KeySums(packing, keys.like)
            yield from routed_blocks(number, step, packing.views(held), sums, _MAX_BLOCKS)
        if self.kv_cache != "full":
            keys.saved.append(held if self.kv_cache == "none" else held[num_keys:].clone())

    def _backward(self, steps: Sequence[Step], keys: RankKeys) -> Iterator[RoutedBlock]:
        packing, window = Packing(keys.shapes[0]), self.group.size()
        incoming: SendReceiveWork | None = None
        of_window: SendReceiveWork | None = None
        numbers = reversed(range(len(steps)))
        for number, held in zip(numbers, self._held_again(keys.saved, len(steps)), strict=True):
            sums = KeySums(packing, keys.like)
            step = steps[number]
            yield from routed_blocks(number, step, packing.views(held), sums, _MAX_BLOCKS)
            total = sums.onto(incoming.wait() if incoming else None)
            incoming = None
            if number % window:
                incoming = pass_on(total, self.group, by=-1, tag=_GRADIENTS)
                continue
            if of_window:
                total += of_window.wait()
            if number:
                assert self.windows is not None
                of_window = pass_on(total, self.windows, by=-1, tag=_GRADIENTS)
        keys.gradients.append(packing.views(total))

    def _held_again(self, saved: Sequence[Tensor], num_steps: int) -> Iterator[Tensor]:
        """Yield keys and values of each step, the last one's first."""
        if self.kv_cache == "full":
            yield from reversed(saved)
            return
        *saved_keys, moving = saved
        for turn, held in enumerate(self._circulated(moving, num_steps, by=-1), 1):
            yield torch.cat((saved_keys[-turn], held)) if saved_keys else held

    def _circulated(self, held: Tensor, num_steps: int, by: int = 1) -> Iterator[Tensor]:
        """Yield the buffer held at each step; the next is received until the iterator resumes."""
        window = min(self.group.size(), num_steps)
        next_window: SendReceiveWork | None = None
        for step in range(num_steps):
            place = step % window
            if place == 0 and step + window < num_steps:
                assert self.windows is not None
                next_window = pass_on(held, self.windows, by=by)
            if place < window - 1:
                incoming: SendReceiveWork | None = pass_on(held, self.group, by=by)
            else:
                incoming, next_window = next_window, None
            yield held
            held = incoming.wait() if incoming else held
