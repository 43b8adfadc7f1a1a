"""Covering arrays: few sets of items in which every pair that can go together does.

Greedy and deterministic: a set starts from the item with the most uncovered pairs, and grows by the
item that covers the most pairs more. Items that exclude one another in groups, such as eight
implementations of one hook, bound the number of sets from below by the product of the two largest
groups; the number of other items hardly matters.
Source: the density algorithm of Colbourn, Cohen and Turban 2004, in its simplest form.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Final

import attrs

Items = frozenset[str]
NONE_NEEDED: Final[Mapping[str, Items]] = {}


def covering_sets(
    items: Sequence[str],
    refused: Collection[Items],
    *,
    needs: Mapping[str, Items] = NONE_NEEDED,
    covered: Iterable[Collection[str]] = (),
) -> list[tuple[str, ...]]:
    """Return sets that contain every item, and every pair of items, that can be in a set.

    Args:
        items: All items, in the order in which ties are broken.
        refused: No superset of one of these is returned. A single item is in no set.
        needs: Item -> items that are added with it, including what those need.
        covered: Sets that exist already: their items and pairs need not be in another set.

    Returns:
        Sets in the order of their construction, each in the order of the items.
    """
    search = _Search.of(items, refused, needs)
    search.want()
    for found in covered:
        search.cover(search.mask(found))
    sets = list(search.sets())
    return [tuple(item for index, item in enumerate(items) if 1 << index & s) for s in sets]


def pairs_of(sets: Iterable[Iterable[str]]) -> set[Items]:
    """Return every pair of items that are in one set."""
    return {frozenset(pair) for found in sets for pair in combinations(found, 2)}


@attrs.define
class _Search:
    """Sets as bit masks; bit i is item i."""

    numbers: Mapping[str, int]
    closures: Sequence[int]
    """Each item with its needs."""
    excluded: Sequence[int]
    """Of each item: those that cannot be in a set with it; itself, if it can be in none."""
    larger: Sequence[int]
    """Refused sets of more than two items."""
    alone: int = 0
    """Items that are not in a set yet."""
    pairs: list[int] = attrs.field(factory=list)
    """Of each item: those that are not in a set with it yet."""

    @classmethod
    def of(
        cls, items: Sequence[str], refused: Collection[Items], needs: Mapping[str, Items]
    ) -> _Search:
        numbers = {item: index for index, item in enumerate(items)}
        excluded, larger = [0] * len(items), []
        for known in refused:
            if not known <= numbers.keys():
                continue
            if len(known) > 2:
                larger.append(sum(1 << numbers[item] for item in known))
            else:
                one, other = numbers[min(known)], numbers[max(known)]
                excluded[one] |= 1 << other
                excluded[other] |= 1 << one
        closures = [
            1 << index | sum(1 << numbers[other] for other in needs.get(item, frozenset()))
            for item, index in numbers.items()
        ]
        return cls(numbers, closures, excluded, larger)

    def mask(self, items: Iterable[str]) -> int:
        return sum(1 << self.numbers[item] for item in {*items} & self.numbers.keys())

    def want(self) -> None:
        """Begin with every item and pair that can be in a set."""
        possible = [closure if self._fits(closure) else 0 for closure in self.closures]
        self.alone = sum(1 << index for index, closure in enumerate(possible) if closure)
        self.pairs = [0] * len(possible)
        for (i, one), (j, other) in combinations(enumerate(possible), 2):
            if one and other and self._fits(one | other):
                self.pairs[i] |= 1 << j
                self.pairs[j] |= 1 << i

    def cover(self, found: int) -> None:
        self.alone &= ~found
        for index in _bits(found):
            self.pairs[index] &= ~found

    def sets(self) -> Iterator[int]:
        """Yield sets until nothing is left to cover."""
        while True:
            degrees = [pairs.bit_count() for pairs in self.pairs]
            first = max(range(len(degrees)), key=degrees.__getitem__, default=0)
            if not any(degrees):
                break
            second = max(_bits(self.pairs[first]), key=degrees.__getitem__)
            yield self._grown(self.closures[first] | self.closures[second], degrees)
        while self.alone:
            yield self._grown(self.closures[next(_bits(self.alone))], [])

    def _grown(self, found: int, degrees: Sequence[int]) -> int:
        """Add the item with the most new pairs, while there is one, and cover the result."""
        candidates = [index for index, pairs in enumerate(self.pairs) if pairs]
        while True:
            gains = {
                index: (self.pairs[index] & found).bit_count()
                for index in candidates
                if not found >> index & 1 and not self.excluded[index] & found
            }
            order = sorted((i for i in gains if gains[i]), key=lambda i: (-gains[i], -degrees[i]))
            more = next((i for i in order if self._fits(found | self.closures[i])), None)
            if more is None:
                self.cover(found)
                return found
            found |= self.closures[more]

    def _fits(self, found: int) -> bool:
        return not any(self.excluded[index] & found for index in _bits(found)) and not any(
            known & found == known for known in self.larger
        )


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
