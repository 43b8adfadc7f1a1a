"""Splits the visible part of a mask into rectangles, so that masked scores are not computed.

Within one document the keys that a query sees are contiguous, and both ends of that range move
right with the query. So every query that sees any key belongs to exactly one rectangle, and a
rectangle is either fully visible, causal from its top left corner, or a band.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import attrs

from ascend_run.types.attention import Mask

QUERY_BLOCK: Final = 256
"""Queries of one rectangle where scores are materialised."""
HALVED_FROM: Final = 128
"""Positions of the shortest causal square that ``halved_attention`` splits."""
SHARED_BANDS: Final = 16
"""Capacity of ``SharedBands``; the bands of a window are all equal except the first and the
last."""
BAND_BLOCK: Final = 256
"""Queries of one banded rectangle; the band's mask has at most this many rows."""


class Shape(enum.Enum):
    """The visible part of a rectangle."""

    FULL = enum.auto()
    CAUSAL = enum.auto()
    """Query i sees keys 0 to i, counted from the rectangle's own corner."""
    BAND = enum.auto()
    """Query i sees keys ``i + low`` to ``i + high``, counted from the rectangle's own corner."""


@attrs.frozen
class Rectangle:
    """A part of the score matrix, half-open in both dims; indices into this call's tensors."""

    query_start: int
    query_end: int
    key_start: int
    key_end: int
    shape: Shape
    low: int = 0
    high: int = 0

    @property
    def num_queries(self) -> int:
        return self.query_end - self.query_start

    @property
    def num_keys(self) -> int:
        return self.key_end - self.key_start

    @property
    def queries(self) -> slice:
        return slice(self.query_start, self.query_end)

    @property
    def keys(self) -> slice:
        return slice(self.key_start, self.key_end)


def rectangles(
    mask: Mask,
    num_queries: int,
    num_keys: int,
    block: int | None = None,
    *,
    band_block: int | None = BAND_BLOCK,
) -> tuple[Rectangle, ...]:
    """Split the visible part of the score matrix; a query in none of the rectangles sees no key.

    Args:
        mask: The mask.
        num_queries: Rows of the score matrix.
        num_keys: Columns of the score matrix.
        block: Maximum number of queries of a rectangle; None limits only bands.
        band_block: Maximum number of queries of a band.
    """
    found: list[Rectangle] = []
    for first, last in _documents(mask, num_queries, num_keys):
        queries = _clip(first - mask.query_start, last - mask.query_start, num_queries)
        keys = _clip(first - mask.key_start, last - mask.key_start, num_keys)
        if queries[0] < queries[1] and keys[0] < keys[1]:
            found.extend(_within_document(mask, queries, keys, block, band_block))
    return tuple(found)


def reach(mask: Mask) -> tuple[int, int]:
    """Return how far a query sees to the left and to the right, in tokens; -1 is unbounded."""
    left, right = mask.window or (-1, -1)
    return left, 0 if mask.causal else right


def seen_keys(mask: Mask, queries: tuple[int, int], keys: tuple[int, int]) -> tuple[int, int]:
    """Return the range of ``keys`` that some query of a range sees; it may be empty.

    Both ends of a query's visible range move right with the query, so the union has no gap.
    """
    left, right = reach(mask)
    first, last = queries[0], queries[1] - 1
    start, end = keys
    if left >= 0:
        start = max(start, first - left)
    if right >= 0:
        end = min(end, last + right + 1)
    if mask.document_ends:
        begin, stop = _document_bounds(sorted({*mask.document_ends}), first, last)
        start, end = max(start, begin), end if stop is None else min(end, stop)
    return start, end


def _document_bounds(ends: Sequence[int], first: int, last: int) -> tuple[int, int | None]:
    """Return the start of the first query's document and the end of the last's, or None if open."""
    before, behind = bisect.bisect_right(ends, first), bisect.bisect_right(ends, last)
    return ends[before - 1] if before else 0, ends[behind] if behind < len(ends) else None


def _documents(mask: Mask, num_queries: int, num_keys: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) positions of the documents that intersect this call."""
    first = min(mask.query_start, mask.key_start)
    end = max(mask.query_start + num_queries, mask.key_start + num_keys)
    inner = (e for e in mask.document_ends or () if first < e < end)
    yield from pairwise((first, *sorted(set(inner)), end))


def _clip(start: int, end: int, size: int) -> tuple[int, int]:
    return max(start, 0), min(end, size)


def _within_document(
    mask: Mask,
    queries: tuple[int, int],
    keys: tuple[int, int],
    block: int | None,
    band_block: int | None,
) -> Iterator[Rectangle]:
    (q0, q1), (k0, k1) = queries, keys
    left, right = reach(mask)
    # Query i (an index) sees keys i + low to i + high within the document.
    shift = mask.query_start - mask.key_start
    low = shift - left if left >= 0 else k0 - q1
    high = shift + right if right >= 0 else k1 - q0
    q0, q1 = max(q0, k0 - high), min(q1, k1 - low)  # other queries see no key
    size = block or (q1 - q0)
    if _shape(q0, q1, k0, k1, low, high) is Shape.BAND:
        size = min(size, band_block or size)
    for start in range(q0, q1, max(size, 1)):
        end = min(start + size, q1)
        first, last = max(k0, start + low), min(k1, end + high)
        shape = _shape(start, end, first, last, low, high)
        corner = start - first
        yield Rectangle(start, end, first, last, shape, low + corner, high + corner)


def _shape(q0: int, q1: int, k0: int, k1: int, low: int, high: int) -> Shape:
    if q1 - 1 + low > k0:  # the last query no longer sees the first key
        return Shape.BAND
    if q0 + high >= k1 - 1:  # the first query sees the last key already
        return Shape.FULL
    return Shape.CAUSAL if q0 + high == k0 else Shape.BAND
