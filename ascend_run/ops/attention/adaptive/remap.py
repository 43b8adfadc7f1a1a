"""Which rank holds which chunk, so that a mask gives all equal work. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Final

from .coarse_mask import CoarseMask

# P ranks, c chunks of each, n = c P chunks in the order of their positions

Assignment = tuple[int, ...]
"""The rank of each chunk; every rank has as many."""

MOST_TRIALS: Final = 4096
"""Exchanges of two chunks whose keys are counted; a bound on the time that a batch's plan takes."""


def remapped(grid: CoarseMask, size: int) -> Assignment:
    """The best of some assignments, and then made better by exchanging two chunks at a time.

    The greatest work of a rank counts first, and then the keys that travel (``price``). Neither
    contiguous parts nor a zig-zag are better by it, as both are among those that are compared.
    """
    return _exchanged(grid, min(candidates(grid, size), key=lambda a: price(grid, a, size)), size)


def candidates(grid: CoarseMask, size: int) -> Iterator[Assignment]:
    """Contiguous parts; chunks dealt back and forth, in two runs a rank (zig-zag) or one by one;
    and by work, the most first, each to the rank that has least so far."""
    each = len(grid.rows) // size
    yield tuple(i // each for i in range(each * size))
    if each % 2 == 0:
        yield dealt(each * size, size, each // 2)
    yield dealt(each * size, size, 1)
    yield _most_first(grid, size)


def dealt(num_chunks: int, size: int, run: int) -> Assignment:
    """Runs of so many chunks to rank 0, 1, ... P - 1, P - 1, ... 1, 0, 0, ..."""
    places = [divmod(i // run, size) for i in range(num_chunks)]
    return tuple(size - 1 - place if turn % 2 else place for turn, place in places)


def price(grid: CoarseMask, assignment: Assignment, size: int) -> tuple[int, int]:
    """The greatest work of a rank, in pairs of a query and a key; and the keys that are sent, each
    as often as a rank needs it that does not hold it.

    Of a chunk that queries on both sides of it see, only the side that sees more is counted.
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


def _exchanged(grid: CoarseMask, assignment: Assignment, size: int) -> Assignment:
    """Takes every exchange of two chunks that lowers the price, until there is none, or the trials
    are used up."""
    work, found = grid.work, [*assignment]
    chunks = _by_rank(assignment, size)
    done = [sum(work[i] for i in held) for held in chunks]
    keys = [_needed(grid, held) for held in chunks]
    trials, most, before = 0, max(done), None
    while before != found and trials < MOST_TRIALS:
        before = [*found]
        for a, b in combinations(range(len(found)), 2):
            first, second = found[a], found[b]
            more = work[b] - work[a]
            if first == second or max(done[first] + more, done[second] - more) > most:
                continue
            if (trials := trials + 1) > MOST_TRIALS:
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
    """Keys that a rank with these chunks has to be sent."""
    most: dict[int, int] = {}
    for i in held:
        for j, tile in grid.rows[i].items():
            most[j] = max(most.get(j, 0), tile.keys)
    return sum(number for j, number in most.items() if j not in held)
