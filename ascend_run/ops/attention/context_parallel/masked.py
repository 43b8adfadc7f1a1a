"""The route that sends keys and values only to the ranks whose queries see them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.transfer.ring import Packing, connect, send_receive
from ascend_run.types.attention import Mask, SequencePartition

from .partitions import Span
from .route import RankKeys, RoutedBlock, routed_blocks
from .schedule import Schedule, Step, masked_work
from .sums import KeySums

# s positions of one rank; B micro-batch (absent in packed layout); G key-value heads; D width of k,
# E of v

_GRADIENTS: Final = 1
"""The tag of gradients, whose sends overlap with those of keys and values."""

_MAX_BLOCKS: Final = 2**20
"""Per step; up to one block per document."""


class MaskedRoute:
    """A route.KeyRoute that in each round receives the visible keys of one other rank.

    Forward: while a rank attends to the keys that it has, it receives those of the next round and
    sends its own. Backward sends the keys and values again, the last round first; the gradients of
    the keys received in a round return to their owner while the next round is computed, and are
    added there in that order.

    Args:
        group: Ranks that share a sequence.

    Communication: forward at most one send and one receive in each round; backward as many, and the
    same in reverse for the gradients; before the first call, once, an all-reduce of one element.
    Source: the rounds are MindSpeed's adaptive context parallelism; sending only visible keys, and
    not full shards, is an addition of ascend-run.
    """

    reads = frozenset({"k", "v"})
    groups_at_once: int | None = None

    def __init__(self, group: dist.ProcessGroup, partition: SequencePartition) -> None:
        self.group, self.partition = group, partition
        self.rank, self.size = group.rank(), group.size()
        self.max_blocks = self.size * _MAX_BLOCKS
        self._is_connected = self.size == 1

    def work(self, mask: Mask, num_queries: int, num_keys: int, placed: bool) -> Schedule:
        lengths = num_queries, num_keys
        return masked_work(mask, self.partition, *lengths, self.rank, self.size, placed)

    def forward(self, work: Schedule, keys: RankKeys) -> Iterator[Iterator[RoutedBlock]]:
        if not self._is_connected:  # a round may leave ranks out
            connect(self.group, keys.like.device)
            self._is_connected = True
        order = range(len(work.steps))
        yield (block for _, _, blocks in self._rounds(work.steps, order, keys) for block in blocks)

    def backward(self, work: Schedule, keys: RankKeys) -> Iterator[Iterator[RoutedBlock]]:
        yield self._backward(work.steps, keys)

    def _backward(self, steps: Sequence[Step], keys: RankKeys) -> Iterator[RoutedBlock]:
        own = Packing(keys.shapes[0])
        pending: _GradientTransfer | None = None
        order = [0, *reversed(range(1, len(steps)))]
        for number, sums, blocks in self._rounds(steps, order, keys):
            yield from blocks
            total = sums.onto(None)
            if number == 0:
                keys.gradients.append(own.views(total))
                continue
            if pending is not None:
                pending.wait_and_add(keys.gradients[0])
            pending = _GradientTransfer(steps[number], total, keys.own[0], self.group)
        if pending is not None:
            pending.wait_and_add(keys.gradients[0])

    def _rounds(
        self, steps: Sequence[Step], order: Sequence[int], keys: RankKeys
    ) -> Iterator[tuple[int, KeySums, Iterator[RoutedBlock]]]:
        """Yield step, sums and blocks; the next step's keys are received until the iterator
        resumes."""
        held = own = keys.own[0]
        for turn, number in enumerate(order, 1):
            incoming = None
            if turn < len(order):
                incoming = _KeyTransfer(steps[order[turn]], own, self.group)
            sums = KeySums(Packing([x.shape for x in held]), keys.like)
            yield number, sums, routed_blocks(number, steps[number], held, sums, _MAX_BLOCKS)
            if incoming is not None:
                held = incoming.wait()


class _KeyTransfer:
    """A round's receive of keys and values, and the send of this rank's own.

    Args:
        own: This rank's keys and values, [s, B, G, D] and [s, B, G, E].
    """

    def __init__(self, step: Step, own: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        packing, self._packing = _packing(step.num_sent, own), _packing(step.num_received, own)
        sent, received = (own[0].new_empty(layout.numel) for layout in (packing, self._packing))
        for part, x in zip(packing.views(sent), own, strict=True):
            for rows, place in _places(part, step.sent_rows):
                place.copy_(x[rows])
        self._work = send_receive((sent, step.target), (received, step.source), group)

    def wait(self) -> list[Tensor]:
        """Return the keys and values received in this round."""
        return self._packing.views(self._work.wait())


class _GradientTransfer:
    """Sends the gradients of a round's keys to their owner, and receives those of this rank's
    own."""

    def __init__(
        self, step: Step, sums: Tensor, own: Sequence[Tensor], group: dist.ProcessGroup
    ) -> None:
        self._rows, self._packing = step.sent_rows, _packing(step.num_sent, own)
        received = sums.new_empty(self._packing.numel)
        self._work = send_receive(
            (sums, step.source), (received, step.target), group, tag=_GRADIENTS
        )

    def wait_and_add(self, totals: Sequence[Tensor]) -> None:
        """Add the received gradients to ``totals``, those of this rank's keys and values."""
        for total, received in zip(totals, self._packing.views(self._work.wait()), strict=True):
            for rows, part in _places(received, self._rows):
                total[rows].add_(part)


def _places(packed: Tensor, spans: Sequence[Span]) -> Iterator[tuple[slice, Tensor]]:
    """Yield each range, and the view of its rows in a tensor of the concatenated ranges."""
    parts = packed.split([end - start for start, end in spans])
    return zip((slice(*span) for span in spans), parts, strict=True)


def _packing(length: int, own: Sequence[Tensor]) -> Packing:
    return Packing([(length, *x.shape[1:]) for x in own])
