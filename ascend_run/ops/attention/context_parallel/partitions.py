"""Sequence partitions: which rank holds which positions. No torch: ``plan`` reports them too.

All implement plugin_api's SequencePartition.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from ascend_run.types.attention import SequencePartition, partition_of

Span = tuple[int, int]
"""Half-open range of positions."""


@attrs.frozen
class ZigZag:
    """Rank r of P holds chunks r and 2P - 1 - r of 2P.

    Under a causal mask an early chunk sees few keys and a late one many; their sum is the same for
    every rank.
    """

    multiple: int = 2

    def chunks(self, seq_length: int, rank: int, size: int) -> Sequence[Span]:
        part = seq_length // (2 * size)
        late = 2 * size - 1 - rank
        return ((rank * part, (rank + 1) * part), (late * part, (late + 1) * part))

    def of_documents(self, document_ends: tuple[int, ...]) -> DocumentZigZag:
        return DocumentZigZag(document_ends)


@attrs.frozen
class DocumentZigZag:
    """Shards every document zig-zag, so that the ranks have equal work in each.

    Documents may have any length: shards differ by a token or two, and surplus tokens in one
    document are balanced in others, so that all ranks hold equally many tokens.
    """

    document_ends: tuple[int, ...]
    multiple: int = 2

    def chunks(self, seq_length: int, rank: int, size: int) -> Sequence[Span]:
        return _document_spans(seq_length, size, self.document_ends)[rank]

    def of_documents(self, document_ends: tuple[int, ...]) -> DocumentZigZag:
        return DocumentZigZag(document_ends)


@attrs.frozen
class Contiguous:
    """Rank r of P holds the r-th of P equal chunks."""

    multiple: int = 1

    def chunks(self, seq_length: int, rank: int, size: int) -> Sequence[Span]:
        part = seq_length // size
        return ((rank * part, (rank + 1) * part),)

    def of_documents(self, document_ends: tuple[int, ...]) -> Contiguous:
        return self


@attrs.frozen
class Nested:
    """Shards what ``outer`` gives each of P / U groups of U = ``inner_size`` ranks into U
    consecutive parts."""

    outer: SequencePartition
    inner_size: int

    @property
    def multiple(self) -> int:
        return self.outer.multiple

    def chunks(self, seq_length: int, rank: int, size: int) -> Sequence[Span]:
        group, place = divmod(rank, self.inner_size)
        of_group = self.outer.chunks(seq_length, group, size // self.inner_size)
        part = seq_length // size
        return tuple(_slice(of_group, place * part, (place + 1) * part))

    def of_documents(self, document_ends: tuple[int, ...]) -> Nested:
        return attrs.evolve(self, outer=partition_of(self.outer, document_ends))


PARTITIONS: Final[Mapping[str, ZigZag | Contiguous]] = {
    "zig-zag": ZigZag(),
    "contiguous": Contiguous(),
}


def _slice(spans: Sequence[Span], begin: int, end: int) -> list[Span]:
    """Return the positions at offsets ``begin`` to ``end`` of the concatenated spans."""
    found = []
    place = 0
    for start, stop in spans:
        first, last = max(begin - place, 0), min(end - place, stop - start)
        if first < last:
            found.append((start + first, start + last))
        place += stop - start
    return found


@functools.lru_cache(maxsize=64)
def _document_spans(
    seq_length: int, size: int, document_ends: tuple[int, ...]
) -> tuple[tuple[Span, ...], ...]:
    """Return every rank's spans, in the order of their positions.

    A document of L tokens gives each rank L // P of them, and one of the L % P left to as many
    ranks: each rank takes one before any takes a second, those with the least work first. As S is a
    multiple of P, all take equally many in the end.
    """
    assert seq_length % size == 0, "the ranks must divide the sequence length"
    work = [0] * size
    waiting: list[int] = []
    by_rank: list[list[Span]] = [[] for _ in range(size)]
    inner = sorted({end for end in document_ends if 0 < end < seq_length})
    for start, end in itertools.pairwise((0, *inner, seq_length)):
        held = [(end - start) // size] * size
        for _ in range((end - start) % size):
            waiting = waiting or [*range(size)]
            taker = min(waiting, key=work.__getitem__)
            waiting.remove(taker)
            held[taker] += 1
        # A rank with less work so far takes the larger half late, where a token sees more keys.
        mean = sum(work) / size
        early = [n // 2 if done < mean else n - n // 2 for n, done in zip(held, work, strict=True)]
        order = [*range(size), *reversed(range(size))]
        lengths = [*early, *(held[r] - early[r] for r in reversed(range(size)))]
        place = start
        for rank, length in zip(order, lengths, strict=True):
            if length:
                by_rank[rank].append((place, place + length))
                first, last = place - start + 1, place - start + length
                work[rank] += (first + last) * length // 2
            place += length
    return tuple(tuple(spans) for spans in by_rank)
