"""What one rank sends, receives and computes, step by step. No torch."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import attrs

from ascend_run.ops.attention.ring_attention.blocks import Block, blocks
from ascend_run.ops.attention.ring_attention.cut import Cut, Span

from .rounds import Mask, Transfer, exchange_rounds


@attrs.frozen(kw_only=True)
class Step:
    """A round of messages, and what is computed with the keys that it brings."""

    sent: Transfer | None = None
    places: tuple[Span, ...] = ()
    """Where what is sent lies in what this rank holds."""
    received: Transfer | None = None
    keys: tuple[Span, ...]
    """Positions of the keys that are here then; of the first step this rank's own."""
    blocks: tuple[Block, ...]

    @property
    def num_sent(self) -> int:
        return 0 if self.sent is None else self.sent.num_keys

    @property
    def num_received(self) -> int:
        return 0 if self.received is None else self.received.num_keys


@attrs.frozen(kw_only=True)
class Work:
    """Of one rank."""

    steps: tuple[Step, ...]
    """The first has no messages; so many more as there are rounds, for all ranks."""
    queries: tuple[Span, ...]
    """Positions."""


@functools.lru_cache(maxsize=256)
def adaptive_work(
    mask: Mask,
    cut: Cut,
    num_queries: int,
    num_keys: int,
    rank: int,
    size: int,
    placed: bool = False,
) -> Work:
    """Args: as ``ring_steps`` takes them."""
    mask = attrs.evolve(mask, query_start=0, key_start=0)
    if mask.document_ends:
        cut = cut.of_documents(mask.document_ends)
    queries, own = cut.chunks(num_queries, rank, size), cut.chunks(num_keys, rank, size)
    steps = [Step(keys=tuple(own), blocks=blocks(mask, queries, own, placed))]
    for messages in exchange_rounds(mask, cut, num_queries, num_keys, size):
        sent = next((m for m in messages if m.source == rank), None)
        received = next((m for m in messages if m.target == rank), None)
        keys = () if received is None else received.spans
        steps.append(
            Step(
                sent=sent,
                places=() if sent is None else tuple(_places(own, sent.spans)),
                received=received,
                keys=keys,
                blocks=blocks(mask, queries, keys, placed),
            )
        )
    return Work(steps=tuple(steps), queries=tuple(queries))


def _places(held: Sequence[Span], spans: Sequence[Span]) -> Iterator[Span]:
    """Of spans that each lie in one of those that are held."""
    for start, end in spans:
        place = 0
        for first, last in held:
            if first <= start and end <= last:
                yield place + start - first, place + end - first
            place += last - first
