"""The heads and the sequence ranges that each rank of a head all-to-all owns.

Imports no torch: cost formulas use it too.
"""

from __future__ import annotations

import functools
import itertools
import math

import attrs

# P ranks; N query heads and G key-value heads of all of them

HeadRanges = tuple[tuple[int, int], ...]
"""Half-open (start, end) of each rank in order; ranges of two ranks may overlap."""


@functools.cache
def parts(total: int, size: int) -> HeadRanges:
    """Split ``total`` into consecutive ranges for ``size`` ranks; the first ranks get the
    remainder."""
    each, more = divmod(total, size)
    starts = [rank * each + min(rank, more) for rank in range(size + 1)]
    return tuple(itertools.pairwise(starts))


@attrs.frozen
class HeadShare:
    """The heads one rank attends with."""

    queries: tuple[int, int]
    """Half-open range of its query heads."""
    groups: tuple[int, int]
    """Half-open range of the key-value heads that those query heads need."""
    copies: tuple[int, ...]
    """Repeats of each key-value head, so that all serve equally many query heads; all 1 where they
    already do."""

    @property
    def num_queries(self) -> int:
        return self.queries[1] - self.queries[0]

    @property
    def num_groups(self) -> int:
        return self.groups[1] - self.groups[0]


@functools.cache
def head_shares(num_heads: int, num_groups: int, size: int) -> tuple[HeadShare, ...]:
    """Return each rank's share: consecutive query heads and only the key-value heads they need.

    If P divides N, and P divides G or G divides P, no rank repeats a head.

    Raises:
        ValueError: If G does not divide N, or if there are fewer query heads than ranks.
    """
    if num_heads % num_groups or num_heads < size:
        raise ValueError(
            f"{num_heads} query heads with {num_groups} key-value heads cannot be split over "
            f"{size} ranks; use a multiple of {num_groups} that is at least {size}"
        )
    each = num_heads // num_groups
    shares = []
    for start, stop in parts(num_heads, size):
        groups = range(start // each, (stop - 1) // each + 1)
        needed = [min(stop, (g + 1) * each) - max(start, g * each) for g in groups]
        unit = math.gcd(*needed)
        copies = tuple(number // unit for number in needed)
        even = len(set(copies)) == 1
        shares.append(
            HeadShare(
                queries=(start, stop),
                groups=(groups.start, groups.stop),
                copies=(1,) * len(groups) if even else copies,
            )
        )
    return tuple(shares)
