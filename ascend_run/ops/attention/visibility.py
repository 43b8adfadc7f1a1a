"""Which rectangles of the score matrix a mask leaves, so that nothing hidden is computed.

Along one document the keys that a query sees are one run, and both ends of that run move right
with the query. So every query that sees anything belongs to exactly one rectangle, and a rectangle
is either fully visible, cut by the diagonal from its top left corner, or a band.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from itertools import pairwise
from typing import Final, Protocol

import attrs

QUERY_BLOCK: Final = 256
"""Queries of one rectangle where its scores are at hand."""
HALVED_FROM: Final = 128
"""Positions of the shortest causal square that ``halved_attention`` cuts."""
SHARED_BANDS: Final = 16
"""Masks that ``shared_bands`` holds at most; those of a window are all alike but for its first and
its last."""
BAND_BLOCK: Final = 256
"""Queries of one banded rectangle; the band's mask is at most this many rows."""


class MaskRules(Protocol):
    """What is read of plugin_api's Mask, which says what each field means."""

    @property
    def causal(self) -> bool: ...
    @property
    def window(self) -> tuple[int, int] | None: ...
    @property
    def document_ends(self) -> tuple[int, ...] | None: ...
    @property
    def query_start(self) -> int: ...
    @property
    def key_start(self) -> int: ...


@attrs.frozen(kw_only=True)
class CausalMask:
    """The rules of one causal document, as a plan knows them."""

    window: tuple[int, int] | None = None
    causal: bool = True
    document_ends: None = None
    query_start: int = 0
    key_start: int = 0


class Shape(enum.Enum):
    """What of a rectangle is visible."""

    FULL = enum.auto()
    CAUSAL = enum.auto()
    """Query i sees keys 0 to i, counted from the rectangle's own corner."""
    BAND = enum.auto()
    """Query i sees keys ``i + low`` to ``i + high``, counted from the rectangle's own corner."""


@attrs.frozen
class Rectangle:
    """A part of the score matrix, half-open on both axes; indices into this call's tensors."""

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
    mask: MaskRules,
    num_queries: int,
    num_keys: int,
    block: int | None = None,
    *,
    band_block: int | None = BAND_BLOCK,
) -> tuple[Rectangle, ...]:
    """Cut the visible part of the score matrix; a query in none of the rectangles sees no key.

    Args:
        mask: The rules.
        num_queries: Rows of the score matrix.
        num_keys: Columns of the score matrix.
        block: Cut every rectangle to at most so many queries; None leaves whole what is not a
            band.
        band_block: The same for bands.
    """
    found: list[Rectangle] = []
    for first, last in _documents(mask, num_queries, num_keys):
        queries = _clip(first - mask.query_start, last - mask.query_start, num_queries)
        keys = _clip(first - mask.key_start, last - mask.key_start, num_keys)
        if queries[0] < queries[1] and keys[0] < keys[1]:
            found.extend(_within_document(mask, queries, keys, block, band_block))
    return tuple(found)


def _documents(mask: MaskRules, num_queries: int, num_keys: int) -> Iterator[tuple[int, int]]:
    """Position ranges of the documents, over every position of this call."""
    first = min(mask.query_start, mask.key_start)
    end = max(mask.query_start + num_queries, mask.key_start + num_keys)
    inner = (e for e in mask.document_ends or () if first < e < end)
    yield from pairwise((first, *sorted(set(inner)), end))


def _clip(start: int, end: int, size: int) -> tuple[int, int]:
    return max(start, 0), min(end, size)


def _within_document(
    mask: MaskRules,
    queries: tuple[int, int],
    keys: tuple[int, int],
    block: int | None,
    band_block: int | None,
) -> Iterator[Rectangle]:
    (q0, q1), (k0, k1) = queries, keys
    left, right = mask.window or (-1, -1)
    if mask.causal:
        right = 0
    # Query i (an index) sees keys i + low to i + high, as far as the document's keys go.
    shift = mask.query_start - mask.key_start
    low = shift - left if left >= 0 else k0 - q1
    high = shift + right if right >= 0 else k1 - q0
    q0, q1 = max(q0, k0 - high), min(q1, k1 - low)  # the others see no key
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
