"""Which parts of the score matrix a rank computes at each step of the ring. No torch.

A rank holds some chunks of positions, laid one after the other. Where every key of a chunk is seen
by every query of another the mask falls away and neighbours are joined; where none is, nothing is
computed; what is left is given to the inner kernel with the positions of both chunks.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import attrs

from ascend_run.plugin_api import Mask

from .partition import Contiguous, ZigZag

Span = tuple[int, int]
"""Half-open."""


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


@functools.lru_cache(maxsize=256)
def ring_steps(
    mask: Mask,
    partition: ZigZag | Contiguous,
    num_queries: int,
    num_keys: int,
    rank: int,
    size: int,
) -> tuple[tuple[Block, ...], ...]:
    """What one rank computes at each step, at step i with the keys of rank ``rank - i``.

    As many steps as the rank with the farthest keys needs; so they are the same number for all.

    Args:
        mask: Of the whole sequence; where queries and keys start is the partition's to say.
        num_queries, num_keys: Of the whole sequence.
    """
    mask = attrs.evolve(mask, query_start=0, key_start=0)

    def at(step: int, of_rank: int) -> tuple[Block, ...]:
        queries = partition.chunks(num_queries, of_rank, size)
        keys = partition.chunks(num_keys, (of_rank - step) % size, size)
        return blocks(mask, queries, keys)

    farthest = max((i for i in range(1, size) if any(at(i, r) for r in range(size))), default=0)
    return tuple(at(i, rank) for i in range(farthest + 1))


def blocks(mask: Mask, queries: Sequence[Span], keys: Sequence[Span]) -> tuple[Block, ...]:
    """Cut the visible part of the scores between two ranks' chunks; no two blocks overlap."""
    rows, columns = _chunks(queries), _chunks(keys)
    if rows == columns and mask == Mask(causal=True):
        # Both are in the order of their positions, so index by index is position by position.
        whole = (0, rows[-1].local[1])
        return (Block(whole, whole, mask),)
    found: list[Block] = []
    for column in columns:
        seen = [(row, _visible(mask, row, column)) for row in rows]
        full = [Block(r.local, column.local, Mask(causal=False)) for r, s in seen if s is _Seen.ALL]
        found += _joined_rows(full)
        found += [
            Block(
                row.local,
                column.local,
                attrs.evolve(mask, query_start=row.start, key_start=column.start),
            )
            for row, s in seen
            if s is _Seen.PART
        ]
    return tuple(_joined_columns(found))


def _chunks(spans: Sequence[Span]) -> list[_Chunk]:
    """With neighbours joined, so that fewer pairs are looked at."""
    found: list[_Chunk] = []
    place = 0
    for start, end in spans:
        if found and found[-1].end == start:
            found[-1] = attrs.evolve(found[-1], end=end)
        else:
            found.append(_Chunk(start, end, place))
        place += end - start
    return found


def _visible(mask: Mask, queries: _Chunk, keys: _Chunk) -> _Seen:
    left, right = mask.window or (-1, -1)
    if mask.causal:
        right = 0
    documents = list(_documents(mask, queries, keys))
    sees_all, sees_any = len(documents) == 1, False
    for start, end in documents:
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


def _documents(mask: Mask, queries: _Chunk, keys: _Chunk) -> Iterator[Span]:
    first, end = min(queries.start, keys.start), max(queries.end, keys.end)
    inner = {e for e in mask.document_ends or () if first < e < end}
    yield from pairwise((first, *sorted(inner), end))


def _joined_rows(found: Sequence[Block]) -> Iterator[Block]:
    """Blocks of the same keys, one where their queries lie beside each other."""
    return _joined(found, lambda a, b: a.keys == b.keys and a.queries[1] == b.queries[0])


def _joined_columns(found: Sequence[Block]) -> Iterator[Block]:
    """Fully visible blocks of the same queries, one where their keys lie beside each other."""
    full = [block for block in found if block.mask == Mask(causal=False)]
    yield from (block for block in found if block.mask != Mask(causal=False))
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
