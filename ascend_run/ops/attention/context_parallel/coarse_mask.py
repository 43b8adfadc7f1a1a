"""Exact counts of the visible pairs between chunks of a sequence. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

import attrs

from ascend_run.ops.attention.visibility import reach, seen_keys
from ascend_run.types.attention import Mask

from .partitions import Span


@attrs.frozen
class Tile:
    """The scores between the queries of one chunk and the keys of another."""

    pairs: int
    """Visible query-key pairs."""
    keys: int
    """Keys that at least one query of the chunk sees."""


@attrs.frozen
class CoarseMask:
    """A grid of n x n tiles over the scores of a sequence; fully masked tiles are left out."""

    rows: tuple[Mapping[int, Tile], ...]
    """For each chunk of queries: chunk of keys -> tile."""

    @property
    def work(self) -> tuple[int, ...]:
        """Visible pairs of each chunk's queries."""
        return tuple(sum(tile.pairs for tile in row.values()) for row in self.rows)


def coarse_mask(mask: Mask, length: int, num_chunks: int) -> CoarseMask:
    """Compute the grid of a sequence in ``num_chunks`` chunks, which must divide its length."""
    size = length // num_chunks
    pairs: list[dict[int, int]] = [{} for _ in range(num_chunks)]
    for document in _documents(mask, length):
        for i, queries in _chunks(document, size):
            for j, keys in _chunks(_within(mask, queries, document), size):
                pairs[i][j] = pairs[i].get(j, 0) + visible_pairs(mask, queries, keys)
    rows = []
    for i, row in enumerate(pairs):
        start, end = seen_keys(mask, (i * size, (i + 1) * size), (0, length))
        numbers = {j: min(end, (j + 1) * size) - max(start, j * size) for j in row}
        rows.append({j: Tile(row[j], numbers[j]) for j in sorted(row) if row[j]})
    return CoarseMask(tuple(rows))


def visible_pairs(mask: Mask, queries: Span, keys: Span) -> int:
    """Return the number of visible pairs between queries and keys of one document."""
    left, right = reach(mask)
    num_all = (queries[1] - queries[0]) * (keys[1] - keys[0])
    near = num_all if right < 0 else _pairs_up_to(right, queries, keys)
    return near - (0 if left < 0 else _pairs_up_to(-left - 1, queries, keys))


def _pairs_up_to(distance: int, queries: Span, keys: Span) -> int:
    """Count the pairs whose key is at most ``distance`` positions after the query."""

    def sum_to(number: int) -> int:
        return number * (number + 1) // 2 if number > 0 else 0

    (q0, q1), (k0, k1) = queries, keys
    return (
        sum_to(q1 + distance - k0)
        - sum_to(q0 + distance - k0)
        - sum_to(q1 + distance - k1)
        + sum_to(q0 + distance - k1)
    )


def _documents(mask: Mask, length: int) -> Iterator[Span]:
    inner = {end for end in mask.document_ends or () if 0 < end < length}
    yield from pairwise((0, *sorted(inner), length))


def _within(mask: Mask, queries: Span, document: Span) -> Span:
    """Return the keys of the document within the window of the queries."""
    left, right = reach(mask)
    start = document[0] if left < 0 else max(document[0], queries[0] - left)
    return start, document[1] if right < 0 else min(document[1], queries[1] + right)


def _chunks(span: Span, size: int) -> Iterator[tuple[int, Span]]:
    """Yield each chunk that intersects the span, and the intersection."""
    start, end = span
    for chunk in range(start // size, -(-end // size)):
        yield chunk, (max(start, chunk * size), min(end, (chunk + 1) * size))
