"""Delta debugging: which members of a failing set it takes to fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

Item = TypeVar("Item")


def smallest(items: Sequence[Item], fails: Callable[[tuple[Item, ...]], bool]) -> tuple[Item, ...]:
    """Return a subset that fails, and of which no member can be left out.

    Source: ddmin of Zeller and Hildebrandt 2002, Simplifying and isolating failure-inducing input.
    One culprit among n takes about 2 log2(n) tests.

    Args:
        items: Fail together; this is not tested again.
        fails: Whether a subset, in the order of the items, fails. Called at most once for each
            subset, never with all items or none.

    Returns:
        The subset, in the order of the items. It is minimal, but another one may be smaller.
    """
    tested: dict[tuple[Item, ...], bool] = {(): False}

    def known(subset: tuple[Item, ...]) -> bool:
        if subset not in tested:
            tested[subset] = fails(subset)
        return tested[subset]

    found, count = tuple(items), 2
    while len(found) > 1:
        chunks = [*_chunks(found, count)]
        without = [tuple(item for item in found if item not in chunk) for chunk in chunks]
        failing = next((c for c in (*chunks, *without) if known(c)), None)
        if failing is not None:
            count = 2 if failing in chunks else max(2, count - 1)
            found = failing
        elif count < len(found):
            count = min(len(found), 2 * count)
        else:
            break
    return found


def _chunks(items: tuple[Item, ...], count: int) -> Iterator[tuple[Item, ...]]:
    """Split items into chunks whose lengths differ by at most one."""
    bounds = [len(items) * index // count for index in range(count + 1)]
    for begin, end in pairwise(bounds):
        yield items[begin:end]
