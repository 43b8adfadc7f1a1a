"""What one rank sends, receives and computes at each step of a KV route. No torch."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import attrs

from ascend_run.types.attention import Mask, SequencePartition, partition_of

from .blocks import Block, blocks
from .partitions import Span
from .rounds import Transfer, exchange_rounds


@attrs.frozen(kw_only=True)
class Step:
    """The keys available at one time, and the blocks computed with them."""

    keys: tuple[Span, ...]
    """Positions of the keys; this rank's own at the first step."""
    blocks: tuple[Block, ...]
    sent: Transfer | None = None
    """What this rank sends and receives before the step, in a route by rounds."""
    sent_rows: tuple[Span, ...] = ()
    """Ranges of the sent keys in what this rank holds."""
    received: Transfer | None = None

    @property
    def num_sent(self) -> int:
        return 0 if self.sent is None else self.sent.num_keys

    @property
    def target(self) -> int | None:
        """The rank to which this one sends, if any; ``source`` alike."""
        return None if self.sent is None else self.sent.target

    @property
    def source(self) -> int | None:
        return None if self.received is None else self.received.source

    @property
    def num_received(self) -> int:
        return 0 if self.received is None else self.received.num_keys


@attrs.frozen(kw_only=True)
class Schedule:
    """The steps of one rank; all ranks have equally many."""

    queries: tuple[Span, ...]
    """Positions of its queries."""
    steps: tuple[Step, ...]

    def keys(self, step: int) -> tuple[Span, ...]:
        """Return the positions of the keys available at a step."""
        return self.steps[step].keys


@functools.lru_cache(maxsize=256)
def masked_work(
    mask: Mask,
    partition: SequencePartition,
    num_queries: int,
    num_keys: int,
    rank: int,
    size: int,
    placed: bool = False,
) -> Schedule:
    """Return the schedule of one rank that receives only visible keys: a step without
    communication, then one per round, as many for all ranks. Args: as ``ring_steps``."""
    mask = attrs.evolve(mask, query_start=0, key_start=0)
    partition = partition_of(partition, mask.document_ends)
    queries, own = partition.chunks(num_queries, rank, size), partition.chunks(num_keys, rank, size)
    steps = [Step(keys=tuple(own), blocks=blocks(mask, queries, own, placed))]
    for transfers in exchange_rounds(mask, partition, num_queries, num_keys, size):
        sent = next((m for m in transfers if m.source == rank), None)
        received = next((m for m in transfers if m.target == rank), None)
        keys = () if received is None else received.spans
        steps.append(
            Step(
                sent=sent,
                sent_rows=() if sent is None else tuple(_local_rows(own, sent.spans)),
                received=received,
                keys=keys,
                blocks=blocks(mask, queries, keys, placed),
            )
        )
    return Schedule(queries=tuple(queries), steps=tuple(steps))


def _local_rows(held: Sequence[Span], spans: Sequence[Span]) -> Iterator[Span]:
    """Yield the ranges of ``spans`` in what a rank holds; each lies within one held span."""
    for start, end in spans:
        offset = 0
        for first, last in held:
            if first <= start and end <= last:
                yield offset + start - first, offset + end - first
            offset += last - first
