"""Which keys a run of queries sees. No torch."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Protocol

from .cut import Span


class Rules(Protocol):
    """What is read of plugin_api's Mask, which says what each field means."""

    @property
    def causal(self) -> bool: ...
    @property
    def window(self) -> tuple[int, int] | None: ...
    @property
    def document_ends(self) -> tuple[int, ...] | None: ...


def reach(mask: Rules) -> tuple[int, int]:
    """How far a query sees to the left and to the right; -1 is unbounded."""
    left, right = mask.window or (-1, -1)
    return left, 0 if mask.causal else right


def seen_keys(mask: Rules, queries: Span, keys: Span) -> Span:
    """What some query of a run of positions sees of a run of keys: one run, which may be empty.

    Along the queries both ends of what one sees move right, and no gap is left between two.
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
    """Where the first query's document begins, and where that of the last ends, if it does."""
    before, behind = bisect.bisect_right(ends, first), bisect.bisect_right(ends, last)
    return ends[before - 1] if before else 0, ends[behind] if behind < len(ends) else None
