"""Choose what becomes of each layer: the least time within a number of bytes. No torch.

A multiple-choice knapsack, by dynamic programming over sums of costs, which are small integers: for
each sum it keeps the least bytes, unless a smaller sum takes no more. In an interleaved pipeline
the forwards in flight of two chunks are the most at different moments; the budget holds at each.
"""

from __future__ import annotations

import heapq
import itertools
import operator
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import attrs

from .treatment import Treatment

_ALIKE: Final = 8
"""Sums of one cost that are looked at."""


@attrs.frozen
class Choice:
    """What may become of one layer."""

    treatment: Treatment
    nbytes: int  #: What the layer then keeps for backward. Unit: bytes.
    cost: int  #: Time of the recomputation, or that copies are waited for, in any unit.


@attrs.frozen
class Kind:
    """Layers with the same choices and as many forwards in flight."""

    choices: tuple[Choice, ...]
    layers: int  #: Number of them.
    in_flight: tuple[int, ...] = (1,)
    """Forwards of such a layer that wait for their backward, at each moment of a step."""

    def at_each_moment(self, choice: Choice) -> tuple[int, ...]:
        """Return what one layer then keeps, over its forwards in flight. Unit: bytes."""
        return tuple(count * choice.nbytes for count in self.in_flight)

    def least(self) -> tuple[int, ...]:
        """Return what all layers then keep at least. Unit: bytes."""
        nbytes = self.layers * min(choice.nbytes for choice in self.choices)
        return tuple(count * nbytes for count in self.in_flight)


class _Chosen(NamedTuple):
    """Choices of the layers so far."""

    totals: tuple[int, ...]  #: Bytes at each moment.
    last: Choice | None = None
    before: _Chosen | None = None

    def choices(self) -> Iterator[Choice]:
        """Yield them, the last layer's first."""
        at: _Chosen | None = self
        while at is not None and at.last is not None:
            yield at.last
            at = at.before


def useful(choices: Iterable[Choice]) -> tuple[Choice, ...]:
    """Return the choices that no other one beats in both bytes and cost, the cheapest first."""
    found: list[Choice] = []
    for choice in sorted(choices, key=_cheapest_first):
        if not found or choice.nbytes < found[-1].nbytes:
            found.append(choice)
    return tuple(found)


def most_at_once(kinds: Sequence[Kind], chosen: Sequence[Sequence[Choice]]) -> int:
    """Return the bytes of some choices of all layers, at the moment at which they are the most."""
    pairs = zip(kinds, chosen, strict=True)
    return max(_sum(*(kind.at_each_moment(c) for kind, choices in pairs for c in choices)))


def smallest(kinds: Sequence[Kind]) -> int:
    """Return the least bytes that any choices of all layers take."""
    return max(_sum(*(kind.least() for kind in kinds)))


def fullest(moments: Collection[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the moments at which something waits that does not at another one, in order."""
    return [
        now
        for now in sorted(moments)
        if not any(now != other and all(map(operator.le, now, other)) for other in moments)
    ]


def solve(kinds: Sequence[Kind], budget: int) -> list[tuple[Choice, ...]] | None:
    """Return for each kind the choices of its layers, the most expensive first, which together cost
    least within the budget at each moment, and of these take the fewest bytes; None if none are
    within it.

    Exact for one moment; of several, sums that are alike in cost are compared by the moment at
    which they take most, and only the ``_ALIKE`` first of them are looked at.
    """
    if smallest(kinds) > budget:
        return None
    room = tuple(budget - least for least in _sum(*(kind.least() for kind in kinds)))
    found: dict[int, list[_Chosen]] = {0: [_Chosen((0,) * len(room))]}
    for kind in kinds:
        options = [(choice, kind.at_each_moment(choice)) for choice in useful(kind.choices)]
        for _ in range(kind.layers):
            room = _sum(room, options[-1][1])  # the last option takes least
            found = _not_beaten(_with_another(found, options, room))
    (best, *_) = found[min(found)]
    by_layer = iter(reversed([*best.choices()]))
    return [
        tuple(sorted((next(by_layer) for _ in range(kind.layers)), key=lambda c: -c.cost))
        for kind in kinds
    ]


def _with_another(
    found: dict[int, list[_Chosen]],
    options: Sequence[tuple[Choice, tuple[int, ...]]],
    room: tuple[int, ...],
) -> dict[int, list[_Chosen]]:
    """Return the choices of one layer more, by their costs.

    Args:
        options: Choices of that layer, with their bytes at each moment.
        room: The most bytes of all layers so far, at each moment.
    """
    sums: dict[int, list[_Chosen]] = {}
    for cost, alike in found.items():
        for chosen, (choice, nbytes) in itertools.product(alike, options):
            totals = tuple(map(operator.add, chosen.totals, nbytes))
            if all(map(operator.le, totals, room)):
                sums.setdefault(cost + choice.cost, []).append(_Chosen(totals, choice, chosen))
    return sums


def _not_beaten(sums: dict[int, list[_Chosen]]) -> dict[int, list[_Chosen]]:
    """Leave out what takes no fewer bytes, at any moment, than something no more expensive."""
    found: dict[int, list[_Chosen]] = {}
    last: deque[tuple[int, ...]] = deque(maxlen=_ALIKE)
    for cost in sorted(sums):
        kept: list[_Chosen] = []
        for chosen in heapq.nsmallest(_ALIKE, sums[cost], key=_most_first):
            if not any(all(map(operator.le, totals, chosen.totals)) for totals in last):
                kept.append(chosen)
                last.append(chosen.totals)
        if kept:
            found[cost] = kept
    return found


def _cheapest_first(choice: Choice) -> tuple[int, int, int, Treatment]:
    return choice.cost, choice.nbytes, choice.treatment.num_parts, choice.treatment


def _most_first(chosen: _Chosen) -> tuple[int, int]:
    return max(chosen.totals), sum(chosen.totals)


def _sum(*totals: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*totals, strict=True)))
