"""Find the smallest set of choices that fails, in few comparisons. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Fails = Callable[[Sequence[str]], bool]


def smallest_failing(choices: Sequence[str], fails: Fails) -> tuple[str, ...]:
    """Return a set of choices that fails, and does not without any one of them.

    Each culprit is the last choice of the shortest prefix that fails, which is found by bisection.
    One is searched after the other, until the culprits fail alone: choices that only fail together
    are all found. For n choices and k culprits, ``fails`` is called for at most
    ``k * (ceil(log2(n)) + 1) + 1`` different sets.

    That nothing can be left out holds if every set with a failing subset fails as well.

    Args:
        choices: They fail together. A choice comes after those that it needs.
        fails: Must return the same for the same set, in any order.
    """
    found: list[str] = []
    rest = list(choices)
    while not fails(found):
        passing, failing = 0, len(rest)
        while failing - passing > 1:
            middle = (passing + failing) // 2
            if fails([*rest[:middle], *found]):
                failing = middle
            else:
                passing = middle
        found.insert(0, rest[failing - 1])
        rest = rest[: failing - 1]
    return tuple(found)
