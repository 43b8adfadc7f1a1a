"""Which parts of the score matrix a rank computes at each step of the ring. No torch.

A rank holds some chunks of positions, laid one after the other. Where every key of a chunk is seen
by every query of another the mask falls away and neighbours are joined; where none is, nothing is
computed; what is left is given to the inner kernel with the positions of both chunks.
"""

from __future__ import annotations

import bisect
import enum
import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import attrs

from .cut import Cut, Span

Mask = Any
"""plugin_api's Mask, which says what each field means."""


@attrs.frozen
class Block:
    """A rectangle of the score matrix between this rank's queries and the keys that it holds."""

    queries: Span
    """Rows, as indices into what this rank holds; so for the keys."""
    keys: Span
    mask: Mask

    @property
    def rows(self) -> slice:
        return slice(*self.queries)

    @property
    def columns(self) -> slice:
        return slice(*self.keys)


class _Seen(enum.Enum):
    NOTHING = enum.auto()
    PART = enum.auto()
    ALL = enum.auto()


@attrs.frozen
class _Chunk:
    """A run of positions and where it lies in what a rank holds."""

    start: int
    end: int
    place: int

    @property
    def local(self) -> Span:
        return self.place, self.place + self.end - self.start


def holder(rank: int, step: int, size: int, window: int) -> int:
    """Whose keys a rank has at a step, where they go round in windows of so many neighbours: all of
    its own window, then all of the window before, and so on. One window of all is the plain ring.
    """
    own_window, place = divmod(rank, window)
    turn, hop = divmod(step, window)
    of_window = (own_window - turn) % (size // window)
    return of_window * window + (place - hop) % window


@functools.lru_cache(maxsize=256)
def ring_steps(
    mask: Mask,
    cut: Cut,
    num_queries: int,
    num_keys: int,
    rank: int,
    size: int,
    window: int,
    placed: bool = False,
) -> tuple[tuple[Block, ...], ...]:
    """What one rank computes at each step, at step i with the keys of ``holder(rank, i)``.

    As many steps as the rank with the farthest keys needs, and all of a window where there are
    several; so they are the same number for all.

    Args:
        mask: Of the whole sequence; where queries and keys start is the cut's to say.
        num_queries, num_keys: Of the whole sequence.
        window: Ranks of one window; it divides ``size``.
        placed: See ``blocks``.
    """
    mask = attrs.evolve(mask, query_start=0, key_start=0)
    if mask.document_ends:
        cut = cut.of_documents(mask.document_ends)

    def at(step: int, of_rank: int) -> tuple[Block, ...]:
        queries = cut.chunks(num_queries, of_rank, size)
        keys = cut.chunks(num_keys, holder(of_rank, step, size, window), size)
        return blocks(mask, queries, keys, placed)

    backwards = range(size - 1, 0, -1)
    last = next((i for i in backwards if any(at(i, r) for r in range(size))), 0)
    if window < size:
        last += -(last + 1) % window
    return tuple(at(i, rank) for i in range(last + 1))


def blocks(
    mask: Mask, queries: Sequence[Span], keys: Sequence[Span], placed: bool = False
) -> tuple[Block, ...]:
    """Cut the visible part of the scores between two ranks' chunks; no two blocks overlap.

    Args:
        placed: Every block is of positions without a gap, and its mask says where they start, also
            where it hides nothing.
    """
    rows, columns = _chunks(queries, mask), _chunks(keys, mask)
    if not placed and rows == columns and mask.causal and mask.window is None and _ascend(rows):
        # Both are in the order of their positions, so index by index is position by position.
        whole = (0, rows[-1].local[1])
        return (Block(whole, whole, attrs.evolve(mask, document_ends=_places(mask, rows))),)
    found: list[Block] = []
    documents = _Documents(mask)
    by_document = documents.index(rows)
    for column in columns:
        near = {row: None for d in documents.of(column) for row in by_document.get(d, ())}
        seen = [(row, _visible(mask, documents, row, column)) for row in near]
        free = attrs.evolve(mask, causal=False, window=None, document_ends=None)
        full = [_block(row, column, free, placed) for row, s in seen if s is _Seen.ALL]
        found += full if placed else _joined_rows(full)
        found += [_block(row, column, mask, True) for row, s in seen if s is _Seen.PART]
    return tuple(found if placed else _joined_columns(found))


def _block(row: _Chunk, column: _Chunk, mask: Mask, placed: bool) -> Block:
    if placed:
        mask = attrs.evolve(mask, query_start=row.start, key_start=column.start)
    return Block(row.local, column.local, mask)


def _chunks(spans: Sequence[Span], mask: Mask) -> list[_Chunk]:
    """With neighbours of one document joined, so that fewer pairs are looked at."""
    ends = {*(mask.document_ends or ())}
    found: list[_Chunk] = []
    place = 0
    for start, end in spans:
        if found and found[-1].end == start and start not in ends:
            found[-1] = attrs.evolve(found[-1], end=end)
        else:
            found.append(_Chunk(start, end, place))
        place += end - start
    return found


def _ascend(chunks: Sequence[_Chunk]) -> bool:
    return all(a.end <= b.start for a, b in pairwise(chunks))


def _places(mask: Mask, chunks: Sequence[_Chunk]) -> tuple[int, ...] | None:
    """Where documents end in what a rank holds, by its own indices."""
    if mask.document_ends is None:
        return None
    starts = [chunk.start for chunk in chunks]
    found = set()
    for end in mask.document_ends:
        before = bisect.bisect_left(starts, end) - 1
        if before >= 0:
            chunk = chunks[before]
            found.add(chunk.place + min(end, chunk.end) - chunk.start)
    return (*sorted(found),)


class _Documents:
    """Which documents a chunk has part in, by their numbers; one, where there are none."""

    def __init__(self, mask: Mask) -> None:
        self._ends = sorted({*(mask.document_ends or ())})

    def of(self, chunk: _Chunk) -> range:
        first = bisect.bisect_right(self._ends, chunk.start)
        return range(first, bisect.bisect_left(self._ends, chunk.end, lo=first) + 1)

    def bounds(self, first: int, end: int) -> list[int]:
        """Both, and where documents end between them."""
        begin = bisect.bisect_right(self._ends, first)
        return [first, *self._ends[begin : bisect.bisect_left(self._ends, end, lo=begin)], end]

    def index(self, chunks: Sequence[_Chunk]) -> dict[int, list[_Chunk]]:
        """Number of a document -> chunks with a part in it."""
        found: dict[int, list[_Chunk]] = {}
        for chunk in chunks:
            for number in self.of(chunk):
                found.setdefault(number, []).append(chunk)
        return found


def _visible(mask: Mask, documents: _Documents, queries: _Chunk, keys: _Chunk) -> _Seen:
    left, right = mask.window or (-1, -1)
    if mask.causal:
        right = 0
    bounds = documents.bounds(min(queries.start, keys.start), max(queries.end, keys.end))
    sees_all, sees_any = len(bounds) == 2, False
    for start, end in pairwise(bounds):
        q0, q1 = max(queries.start, start), min(queries.end, end)
        k0, k1 = max(keys.start, start), min(keys.end, end)
        if q0 >= q1 or k0 >= k1:
            continue
        # Key minus query, over all pairs, is every number from one of these to the other.
        least, most = k0 - (q1 - 1), (k1 - 1) - q0
        sees_any |= (right < 0 or least <= right) and (left < 0 or most >= -left)
        sees_all &= (right < 0 or most <= right) and (left < 0 or least >= -left)
    if not sees_any:
        return _Seen.NOTHING
    return _Seen.ALL if sees_all else _Seen.PART


def _joined_rows(found: Sequence[Block]) -> Iterator[Block]:
    """Blocks of the same keys, one where their queries lie beside each other."""
    return _joined(found, lambda a, b: a.keys == b.keys and a.queries[1] == b.queries[0])


def _joined_columns(found: Sequence[Block]) -> Iterator[Block]:
    """Fully visible blocks of the same queries, one where their keys lie beside each other."""
    full, others = [], []
    for block in found:
        hides = block.mask.causal or block.mask.window or block.mask.document_ends
        (others if hides else full).append(block)
    yield from others
    full.sort(key=lambda block: (block.queries, block.keys))
    yield from _joined(full, lambda a, b: a.queries == b.queries and a.keys[1] == b.keys[0])


def _joined(found: Sequence[Block], beside: Callable[[Block, Block], bool]) -> Iterator[Block]:
    previous: Block | None = None
    for block in found:
        if previous is not None and beside(previous, block):
            queries = previous.queries[0], block.queries[1]
            block = Block(queries, (previous.keys[0], block.keys[1]), block.mask)
        elif previous is not None:
            yield previous
        previous = block
    if previous is not None:
        yield previous
