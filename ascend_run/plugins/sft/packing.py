"""Which conversations share a sample. No torch."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Best fit, the longest first: the numbers of the conversations of each sample.

    A function of the lengths alone. A conversation of n tokens takes n - 1 places, since its last
    one is only a label. Within a sample, and among samples by their first, the conversations stand
    in the order of the files.

    Args:
        lengths: Each at most ``capacity + 1``. Unit: tokens.
        capacity: Places of a sample.
    """
    packs: list[list[int]] = []
    room: list[tuple[int, int]] = []
    """(places that are free, number of the pack), sorted."""
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
