"""Assign documents to packed samples. No torch."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack(lengths: Sequence[int], capacity: int, group: int = 1) -> list[list[int]]:
    """Pack documents by best fit decreasing.

    The result depends on the lengths alone. A document of n tokens takes n - 1 positions, since its
    last token is only a label. Documents within a sample, and samples by their first document, are
    in file order.

    Args:
        lengths: Each group at most ``capacity`` positions. Unit: tokens.
        capacity: Positions of a sample.
        group: Number of consecutive documents that stay together: 2 for pairs.

    Returns:
        The indices of the documents of each sample.
    """
    assert len(lengths) % group == 0
    needed = [
        sum(int(length) - 1 for length in lengths[first : first + group])
        for first in range(0, len(lengths), group)
    ]
    packs: list[list[int]] = []
    room: list[tuple[int, int]] = []
    """(free positions, index of the pack), sorted."""
    for number in sorted(range(len(needed)), key=lambda i: (-needed[i], i)):
        places = needed[number]
        assert places <= capacity
        tightest = bisect_left(room, (places, -1))
        if tightest < len(room):
            free, chosen = room.pop(tightest)
        else:
            free, chosen = capacity, len(packs)
            packs.append([])
        packs[chosen].append(number)
        if free > places:
            insort(room, (free - places, chosen))
    return [documents_of(sorted(held), group) for held in sorted(sorted(held) for held in packs)]


def documents_of(groups: Sequence[int], group: int) -> list[int]:
    """Return the indices of the documents of some groups."""
    return [number * group + place for number in groups for place in range(group)]
