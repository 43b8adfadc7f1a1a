"""Who holds which part of a sequence. No torch: ``plan`` shows it too.

All are plugin_api's SequencePartition.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import attrs

Span = tuple[int, int]
"""Half-open."""


class Cut(Protocol):
    """What is read of plugin_api's SequencePartition, which says what each field means."""

    @property
    def multiple(self) -> int: ...
    def chunks(self, seq_length: int, rank: int, size: int) -> Sequence[Span]: ...
    def of_documents(self, document_ends: tuple[int, ...]) -> Cut: ...


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
    """Every document is cut zig-zag for itself, so that the ranks have equal work in each.

    A document has any length: its pieces differ by a token or two, and what one rank has too much
    in one document it has too little in another, so that all ranks hold equally many tokens.
    """

    document_ends: tuple[int, ...]
    multiple: int = 2

    def chunks(self, seq_length: int, rank: int, size: int) -> Sequence[Span]:
        return _document_pieces(seq_length, size, self.document_ends)[rank]

    def of_documents(self, document_ends: tuple[int, ...]) -> DocumentZigZag:
        return DocumentZigZag(document_ends)


@attrs.frozen
class Contiguous:
    """Rank r of P holds the r-th P-th part."""

    multiple: int = 1

    def chunks(self, seq_length: int, rank: int, size: int) -> Sequence[Span]:
        part = seq_length // size
        return ((rank * part, (rank + 1) * part),)

    def of_documents(self, document_ends: tuple[int, ...]) -> Contiguous:
        return self


@attrs.frozen
class Nested:
    """What ``outer`` gives one of P / U groups of ``inner_size`` neighbours, U, each of them holds
    a U-th part of, in order."""

    outer: Cut
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
        return attrs.evolve(self, outer=self.outer.of_documents(document_ends))


CUTS: Final[Mapping[str, ZigZag | Contiguous]] = {
    "zig-zag": ZigZag(),
    "contiguous": Contiguous(),
}


def _slice(spans: Sequence[Span], begin: int, end: int) -> list[Span]:
    """Places ``begin`` to ``end`` of what the spans hold one after the other."""
    found = []
    place = 0
    for start, stop in spans:
        first, last = max(begin - place, 0), min(end - place, stop - start)
        if first < last:
            found.append((start + first, start + last))
        place += stop - start
    return found


@functools.lru_cache(maxsize=64)
def _document_pieces(
    seq_length: int, size: int, document_ends: tuple[int, ...]
) -> tuple[tuple[Span, ...], ...]:
    """Every rank's pieces, in the order of their positions.

    A document of L tokens gives each rank L // P of them, and the L % P that are left to as many
    ranks: each rank takes one before any takes a second, those first that have the least work so
    far. As S is a multiple of P, all take equally many in the end.
    """
    assert seq_length % size == 0, "a sequence that the ranks cannot share"
    work = [0] * size
    waiting: list[int] = []
    pieces: list[list[Span]] = [[] for _ in range(size)]
    inner = sorted({end for end in document_ends if 0 < end < seq_length})
    for start, end in itertools.pairwise((0, *inner, seq_length)):
        held = [(end - start) // size] * size
        for _ in range((end - start) % size):
            waiting = waiting or [*range(size)]
            taker = min(waiting, key=work.__getitem__)
            waiting.remove(taker)
            held[taker] += 1
        # Who has done less takes the larger half late, where a token sees more keys.
        mean = sum(work) / size
        early = [n // 2 if done < mean else n - n // 2 for n, done in zip(held, work, strict=True)]
        order = [*range(size), *reversed(range(size))]
        lengths = [*early, *(held[r] - early[r] for r in reversed(range(size)))]
        place = start
        for rank, length in zip(order, lengths, strict=True):
            if length:
                pieces[rank].append((place, place + length))
                first, last = place - start + 1, place - start + length
                work[rank] += (first + last) * length // 2
            place += length
    return tuple(tuple(spans) for spans in pieces)
