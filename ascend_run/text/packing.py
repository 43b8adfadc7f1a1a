"""Assign conversations to packed samples. No torch."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack conversations by best fit decreasing.

    The result depends on the lengths alone. A conversation of n tokens takes n - 1 positions, since
    its last token is only a label. Conversations within a sample, and samples by their first
    conversation, are in file order.

    Args:
        lengths: Each at most ``capacity + 1``. Unit: tokens.
        capacity: Positions of a sample.

    Returns:
        The indices of the conversations of each sample.
    """
    packs: list[list[int]] = []
    room: list[tuple[int, int]] = []
    """(free positions, index of the pack), sorted."""
    for number in sorted(range(len(lengths)), key=lambda i: (-int(lengths[i]), i)):
        places = int(lengths[number]) - 1
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
    return sorted(sorted(held) for held in packs)
