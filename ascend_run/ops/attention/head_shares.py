"""Which heads, and which part of a sequence, each rank of an exchange has. No torch: costs too are
reckoned from it."""

from __future__ import annotations

import functools
import itertools
import math

import attrs

# P ranks; N query heads and G key-value heads of all of them

Cut = tuple[tuple[int, int], ...]
"""Of each rank in turn the first and the first one after; two ranks' may overlap."""


@functools.cache
def parts(total: int, size: int) -> Cut:
    """Consecutive shares of ``size`` ranks: equal ones, or the first ranks have one more."""
    each, more = divmod(total, size)
    starts = [rank * each + min(rank, more) for rank in range(size + 1)]
    return tuple(itertools.pairwise(starts))


@attrs.frozen
class HeadShare:
    """What one rank attends with."""

    queries: tuple[int, int]
    """Its query heads."""
    groups: tuple[int, int]
    """The key-value heads that those need."""
    copies: tuple[int, ...]
    """How often each of these lies beside itself, for as many query heads to each; all 1 where it
    is so already."""

    @property
    def num_queries(self) -> int:
        return self.queries[1] - self.queries[0]

    @property
    def num_groups(self) -> int:
        return self.groups[1] - self.groups[0]


@functools.cache
def head_shares(num_heads: int, num_groups: int, size: int) -> tuple[HeadShare, ...]:
    """Every rank's: consecutive query heads, and no key-value head that they do not need.

    Where P divides N and one of P and G the other, no head is copied on any rank.

    Raises:
        ValueError: G does not divide N, or there are fewer query heads than ranks.
    """
    if num_heads % num_groups or num_heads < size:
        raise ValueError(
            f"{num_heads} query heads on {num_groups} key-value heads cannot be shared by {size} "
            "ranks; use a multiple of the key-value heads, and a head for each rank"
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
