"""Assigns chunks to ranks so that a mask gives all ranks equal work. No torch."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Final

import attrs

from ascend_run.types.attention import Mask

from .coarse_mask import CoarseMask, coarse_mask
from .partitions import Span

# P ranks, c chunks of each, n = c P chunks in the order of their positions

Assignment = tuple[int, ...]
"""The rank of each chunk; every rank has equally many chunks."""

MAX_TRIALS: Final = 4096
"""Limit of evaluated swaps of two chunks; bounds the time to plan a batch."""


@attrs.frozen(kw_only=True)
class Remapped:
    """plugin_api's DocumentPartition with several chunks of equal length a rank, assigned so that
    the ranks' work under this mask is as equal as possible (``remap``)."""

    multiple: int
    """Chunks of a rank."""
    mask: Mask = attrs.field(factory=Mask)

    def chunks(self, seq_length: int, rank: int, size: int) -> Sequence[Span]:
        """Return the rank's spans; adjacent chunks are joined."""
        return _held(self, seq_length, size)[rank]

    def of_documents(self, document_ends: tuple[int, ...]) -> Remapped:
        return attrs.evolve(self, mask=attrs.evolve(self.mask, document_ends=document_ends))


@functools.lru_cache(maxsize=64)
def _held(partition: Remapped, seq_length: int, size: int) -> tuple[tuple[Span, ...], ...]:
    num_chunks = partition.multiple * size
    assert seq_length % num_chunks == 0, "the chunks must divide the sequence length"
    length = seq_length // num_chunks
    held: list[list[Span]] = [[] for _ in range(size)]
    for chunk, rank in enumerate(
        remapped(coarse_mask(partition.mask, seq_length, num_chunks), size)
    ):
        spans, start = held[rank], chunk * length
        if spans and spans[-1][1] == start:
            start = spans.pop()[0]
        spans.append((start, (chunk + 1) * length))
    return tuple(tuple(spans) for spans in held)


def remapped(grid: CoarseMask, size: int) -> Assignment:
    """Return the best of several assignments, improved by swapping two chunks at a time.

    Minimises the greatest work of a rank first, then the number of keys sent (``price``).
    Contiguous and zig-zag partitions are among the candidates, so the result is never worse than
    those.
    """
    return _improved(grid, min(candidates(grid, size), key=lambda a: price(grid, a, size)), size)


def candidates(grid: CoarseMask, size: int) -> Iterator[Assignment]:
    """Yield contiguous chunks; chunks dealt back and forth, in two runs a rank (zig-zag) or one by
    one; and greedily by work, the largest chunk first, each to the rank with the least so far."""
    each = len(grid.rows) // size
    yield tuple(i // each for i in range(each * size))
    if each % 2 == 0:
        yield dealt(each * size, size, each // 2)
    yield dealt(each * size, size, 1)
    yield _most_first(grid, size)


def dealt(num_chunks: int, size: int, run: int) -> Assignment:
    """Deal runs of ``run`` chunks to rank 0, 1, ... P - 1, P - 1, ... 1, 0, 0, ..."""
    places = [divmod(i // run, size) for i in range(num_chunks)]
    return tuple(size - 1 - place if turn % 2 else place for turn, place in places)


def price(grid: CoarseMask, assignment: Assignment, size: int) -> tuple[int, int]:
    """Return the greatest work of a rank, in query-key pairs, and the number of keys sent, counted
    once for each rank that needs and does not hold them.

    If queries on both sides of a chunk see it, only the side that sees more is counted.
    """
    work = grid.work
    chunks = _by_rank(assignment, size)
    greatest = max(sum(work[i] for i in held) for held in chunks)
    return greatest, sum(_needed(grid, held) for held in chunks)


def _most_first(grid: CoarseMask, size: int) -> Assignment:
    work, each = grid.work, len(grid.rows) // size
    done, held, found = [0] * size, [0] * size, [0] * len(work)
    for chunk in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        rank = min((r for r in range(size) if held[r] < each), key=lambda r: (done[r], r))
        found[chunk] = rank
        done[rank] += work[chunk]
        held[rank] += 1
    return tuple(found)


def _improved(grid: CoarseMask, assignment: Assignment, size: int) -> Assignment:
    """Swap chunks while that lowers the price, up to MAX_TRIALS evaluations."""
    work, found = grid.work, [*assignment]
    chunks = _by_rank(assignment, size)
    done = [sum(work[i] for i in held) for held in chunks]
    keys = [_needed(grid, held) for held in chunks]
    trials, most, before = 0, max(done), None
    while before != found and trials < MAX_TRIALS:
        before = [*found]
        for a, b in combinations(range(len(found)), 2):
            first, second = found[a], found[b]
            more = work[b] - work[a]
            if first == second or max(done[first] + more, done[second] - more) > most:
                continue
            if (trials := trials + 1) > MAX_TRIALS:
                break
            ranks = first, second
            moved = [[i for i in chunks[r] if i not in (a, b)] for r in ranks]
            moved[0].append(b)
            moved[1].append(a)
            needed = [_needed(grid, held) for held in moved]
            others = max((d for r, d in enumerate(done) if r not in ranks), default=0)
            new = max(others, done[first] + more, done[second] - more)
            if (new, sum(needed)) < (most, keys[first] + keys[second]):
                most, found[a], found[b] = new, second, first
                done[first], done[second] = done[first] + more, done[second] - more
                for r, held, number in zip(ranks, moved, needed, strict=True):
                    chunks[r], keys[r] = held, number
    return tuple(found)


def _by_rank(assignment: Sequence[int], size: int) -> list[list[int]]:
    chunks: list[list[int]] = [[] for _ in range(size)]
    for chunk, rank in enumerate(assignment):
        chunks[rank].append(chunk)
    return chunks


def _needed(grid: CoarseMask, held: Sequence[int]) -> int:
    """Return the number of keys that a rank with these chunks must receive."""
    most: dict[int, int] = {}
    for i in held:
        for j, tile in grid.rows[i].items():
            most[j] = max(most.get(j, 0), tile.keys)
    return sum(number for j, number in most.items() if j not in held)
