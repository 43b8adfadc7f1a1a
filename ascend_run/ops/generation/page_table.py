"""Which pages each sequence has.

Source: Kwon et al. 2023, arXiv:2309.06180, sections 4.2 and 4.4. The pages of a sequence are
adjacent where that is possible, so that attention reads them in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

Runs = list[tuple[int, int]]
"""Half-open ranges, of pages or of tokens; those that follow each other are joined."""


class CacheFull(Exception):
    """No pages are left for a sequence; the message has the tokens asked for and those free."""


class PageTable:
    """Pages of sequences. Sequences that begin with the same tokens may share full pages.

    Args:
        num_pages: Pages there are.
        page_size: Unit: tokens.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages: Final = num_pages
        self.page_size: Final = page_size
        self._free: Runs = [(0, num_pages)] if num_pages else []  # sorted, never adjacent
        self._runs: dict[int, Runs] = {}
        self._num_others: dict[int, int] = {}
        """Of shared pages: sequences that have it, but for one."""

    @property
    def num_free(self) -> int:
        """Number of free pages, adjacent or not."""
        return sum(end - start for start, end in self._free)

    def reserve(self, sequence: int, num_tokens: int) -> None:
        """Give a new sequence pages for so many tokens: the first run that is long enough, or else
        several.

        Raises:
            CacheFull: There are too few free pages.
            ValueError: The sequence has pages already, or ``num_tokens`` is below 1.
        """
        if sequence in self._runs or num_tokens < 1:
            raise ValueError(f"sequence {sequence}: {num_tokens} tokens, or it has pages already")
        self._runs[sequence] = self._taken(-(-num_tokens // self.page_size), num_tokens)

    def grow(self, sequence: int, num_tokens: int) -> None:
        """Give a sequence more pages, if those it has are too few for so many tokens.

        Raises:
            CacheFull: There are too few free pages.
        """
        runs = self._runs[sequence]
        missing = -(-num_tokens // self.page_size) - _length(runs)
        if missing > 0:
            self._runs[sequence] = _joined([*runs, *self._taken(missing, num_tokens)])

    def fork(self, parent: int, child: int, num_stored: int, num_tokens: int | None = None) -> None:
        """Give a new sequence the full pages of the parent's first tokens, and the others of its
        own.

        Args:
            num_stored: Tokens that both have. Those after the last full page are to be copied.
            num_tokens: That the child's pages hold, at least those; None: as the parent's.

        Raises:
            CacheFull: There are too few free pages.
        """
        assert child not in self._runs, f"sequence {child} has pages already"
        runs = self._runs[parent]
        shared = [*_first(runs, num_stored // self.page_size)]
        num_pages = _length(runs) if num_tokens is None else -(-num_tokens // self.page_size)
        count = num_pages - _length(shared)
        own = self._taken(count, count * self.page_size) if count else []
        for page in _members(shared):
            self._num_others[page] = self._num_others.get(page, 0) + 1
        self._runs[child] = _joined([*shared, *own])

    def release(self, sequence: int) -> None:
        """Free the pages that no other sequence has."""
        freed = []
        for page in _members(self._runs.pop(sequence)):
            if others := self._num_others.pop(page, 0):
                if others > 1:
                    self._num_others[page] = others - 1
            else:
                freed.append((page, page + 1))
        self._free = _joined(sorted([*self._free, *freed]))

    def num_tokens(self, sequence: int) -> int:
        """Return how many tokens the pages of a sequence hold; 0 of one without pages."""
        return self.page_size * _length(self._runs.get(sequence, []))

    def tokens(self, sequence: int, start: int, end: int) -> Runs:
        """Return where tokens of a sequence are, as indices into the tokens of all pages."""
        found: Runs = []
        before = 0
        for first, last in self._runs[sequence]:
            offset = first * self.page_size - before
            before += (last - first) * self.page_size
            low, high = max(start + offset, first * self.page_size), min(end, before) + offset
            if low < high:
                found.append((low, high))
        return found

    def _taken(self, count: int, num_tokens: int) -> Runs:
        """Take free pages: adjacent ones if there are enough, or else the first ones."""
        if count > self.num_free:
            raise CacheFull(
                f"{num_tokens} tokens need {count} pages of {self.page_size} tokens, and of "
                f"{self.num_pages * self.page_size} tokens {self.num_free * self.page_size} are "
                "free"
            )
        long_enough = (run for run in self._free if run[1] - run[0] >= count)
        if (run := next(long_enough, None)) is not None:
            taken = [(run[0], run[0] + count)]
            rest = [(run[0] + count, run[1])] if run[0] + count < run[1] else []
            at = self._free.index(run)
            self._free[at : at + 1] = rest
            return taken
        taken = [*_first(self._free, count)]
        self._free = [*_after(self._free, count)]
        return taken


def _length(runs: Runs) -> int:
    return sum(end - start for start, end in runs)


def _members(runs: Runs) -> Iterator[int]:
    for run in runs:
        yield from range(*run)


def _first(runs: Runs, count: int) -> Iterator[tuple[int, int]]:
    for start, end in runs:
        if count > 0:
            yield start, min(end, start + count)
        count -= end - start


def _after(runs: Runs, count: int) -> Iterator[tuple[int, int]]:
    for start, end in runs:
        if end - start > count:
            yield start + max(count, 0), end
        count -= end - start


def _joined(runs: Iterable[tuple[int, int]]) -> Runs:
    joined: Runs = []
    for start, end in runs:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, end))
    return joined
