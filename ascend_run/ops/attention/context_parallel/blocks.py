"""The parts of the score matrix that a rank computes at each ring step. No torch.

A rank holds chunks of positions, stored consecutively. If every query of one chunk sees every key
of another, the block needs no mask and adjacent blocks are joined; if no query sees a key, the
block is skipped; otherwise the inner kernel gets a mask with the positions of both chunks.
"""

from __future__ import annotations

import bisect
import enum
import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import attrs

from ascend_run.ops.attention.visibility import reach
from ascend_run.types.attention import Mask, SequencePartition, partition_of

from .partitions import Span


@attrs.frozen
class Block:
    """A rectangle of the score matrix between this rank's queries and the keys that it holds."""

    queries: Span
    """Half-open indices into this rank's queries; ``keys`` alike."""
    keys: Span
    mask: Mask

    @property
    def rows(self) -> slice:
        return slice(*self.queries)

    @property
    def columns(self) -> slice:
        return slice(*self.keys)


class _Visible(enum.Enum):
    NOTHING = enum.auto()
    PART = enum.auto()
    ALL = enum.auto()


@attrs.frozen
class _Chunk:
    """A range of positions and its offset in what a rank holds."""

    start: int
    end: int
    offset: int

    @property
    def local(self) -> Span:
        return self.offset, self.offset + self.end - self.start


def holder(rank: int, step: int, size: int, window: int) -> int:
    """Return the rank whose keys ``rank`` has at a step: those of its own window first, then those
    of the previous windows. A single window of all ranks is the plain ring."""
    own_window, offset = divmod(rank, window)
    turn, hop = divmod(step, window)
    of_window = (own_window - turn) % (size // window)
    return of_window * window + (offset - hop) % window


@functools.lru_cache(maxsize=256)
def ring_steps(
    mask: Mask,
    partition: SequencePartition,
    num_queries: int,
    num_keys: int,
    rank: int,
    size: int,
    window: int,
    placed: bool = False,
) -> tuple[tuple[Block, ...], ...]:
    """Return the blocks one rank computes at each step; step i has the keys of ``holder(rank, i)``.

    All ranks get the same number of steps: as many as the rank with the farthest visible keys
    needs, rounded up to full windows if there are several.

    Args:
        mask: Mask of the full sequence; its query and key starts are ignored.
        num_queries, num_keys: Of the full sequence.
        window: Ranks of one window; it divides ``size``.
        placed: See ``blocks``.
    """
    mask = attrs.evolve(mask, query_start=0, key_start=0)
    partition = partition_of(partition, mask.document_ends)

    def at(step: int, of_rank: int) -> tuple[Block, ...]:
        queries = partition.chunks(num_queries, of_rank, size)
        keys = partition.chunks(num_keys, holder(of_rank, step, size, window), size)
        return blocks(mask, queries, keys, placed)

    backwards = range(size - 1, 0, -1)
    last = next((i for i in backwards if any(at(i, r) for r in range(size))), 0)
    if window < size:
        last += -(last + 1) % window
    return tuple(at(i, rank) for i in range(last + 1))


def blocks(
    mask: Mask, queries: Sequence[Span], keys: Sequence[Span], placed: bool = False
) -> tuple[Block, ...]:
    """Split the visible part of the scores between two ranks' chunks into disjoint blocks.

    Args:
        placed: Every block has contiguous positions, and its mask has their starts even if it masks
            nothing.
    """
    rows, columns = _chunks(queries, mask), _chunks(keys, mask)
    if not placed and rows == columns and mask.causal and mask.window is None and _ascending(rows):
        # Both are in the order of their positions, so comparing indices is comparing positions.
        whole = (0, rows[-1].local[1])
        return (Block(whole, whole, attrs.evolve(mask, document_ends=_local_ends(mask, rows))),)
    found: list[Block] = []
    documents = _Documents(mask)
    by_document = documents.index(rows)
    for column in columns:
        near = {row: None for d in documents.of(column) for row in by_document.get(d, ())}
        seen = [(row, _visible(mask, documents, row, column)) for row in near]
        free = attrs.evolve(mask, causal=False, window=None, document_ends=None)
        full = [_block(row, column, free, placed) for row, s in seen if s is _Visible.ALL]
        found += full if placed else _joined_rows(full)
        found += [_block(row, column, mask, True) for row, s in seen if s is _Visible.PART]
    return tuple(found if placed else _joined_columns(found))


def _block(row: _Chunk, column: _Chunk, mask: Mask, placed: bool) -> Block:
    if placed:
        mask = attrs.evolve(mask, query_start=row.start, key_start=column.start)
    return Block(row.local, column.local, mask)


def _chunks(spans: Sequence[Span], mask: Mask) -> list[_Chunk]:
    """Join adjacent chunks of one document, so that fewer pairs are compared."""
    ends = {*(mask.document_ends or ())}
    found: list[_Chunk] = []
    offset = 0
    for start, end in spans:
        if found and found[-1].end == start and start not in ends:
            found[-1] = attrs.evolve(found[-1], end=end)
        else:
            found.append(_Chunk(start, end, offset))
        offset += end - start
    return found


def _ascending(chunks: Sequence[_Chunk]) -> bool:
    return all(a.end <= b.start for a, b in pairwise(chunks))


def _local_ends(mask: Mask, chunks: Sequence[_Chunk]) -> tuple[int, ...] | None:
    """Return where documents end, as indices into what a rank holds."""
    if mask.document_ends is None:
        return None
    starts = [chunk.start for chunk in chunks]
    found = set()
    for end in mask.document_ends:
        before = bisect.bisect_left(starts, end) - 1
        if before >= 0:
            chunk = chunks[before]
            found.add(chunk.offset + min(end, chunk.end) - chunk.start)
    return (*sorted(found),)


class _Documents:
    """Numbers of the documents that a chunk intersects; one document if the mask has no ends."""

    def __init__(self, mask: Mask) -> None:
        self._ends = sorted({*(mask.document_ends or ())})

    def of(self, chunk: _Chunk) -> range:
        first = bisect.bisect_right(self._ends, chunk.start)
        return range(first, bisect.bisect_left(self._ends, chunk.end, lo=first) + 1)

    def bounds(self, first: int, end: int) -> list[int]:
        """Return first and end, and the document ends between them."""
        begin = bisect.bisect_right(self._ends, first)
        return [first, *self._ends[begin : bisect.bisect_left(self._ends, end, lo=begin)], end]

    def index(self, chunks: Sequence[_Chunk]) -> dict[int, list[_Chunk]]:
        """Map a document's number to the chunks that intersect it."""
        found: dict[int, list[_Chunk]] = {}
        for chunk in chunks:
            for number in self.of(chunk):
                found.setdefault(number, []).append(chunk)
        return found


def _visible(mask: Mask, documents: _Documents, queries: _Chunk, keys: _Chunk) -> _Visible:
    left, right = reach(mask)
    bounds = documents.bounds(min(queries.start, keys.start), max(queries.end, keys.end))
    sees_all, sees_any = len(bounds) == 2, False
    for start, end in pairwise(bounds):
        q0, q1 = max(queries.start, start), min(queries.end, end)
        k0, k1 = max(keys.start, start), min(keys.end, end)
        if q0 >= q1 or k0 >= k1:
            continue
        # Key minus query takes every value from least to most over all pairs.
        least, most = k0 - (q1 - 1), (k1 - 1) - q0
        sees_any |= (right < 0 or least <= right) and (left < 0 or most >= -left)
        sees_all &= (right < 0 or most <= right) and (left < 0 or least >= -left)
    if not sees_any:
        return _Visible.NOTHING
    return _Visible.ALL if sees_all else _Visible.PART


def _joined_rows(found: Sequence[Block]) -> Iterator[Block]:
    """Join blocks of the same keys if their queries are adjacent."""
    return _joined(found, lambda a, b: a.keys == b.keys and a.queries[1] == b.queries[0])


def _joined_columns(found: Sequence[Block]) -> Iterator[Block]:
    """Join fully visible blocks of the same queries if their keys are adjacent."""
    full: list[Block] = []
    others: list[Block] = []
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
