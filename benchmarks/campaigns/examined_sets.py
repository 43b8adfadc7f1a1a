"""Covering sets of which every one can run, found by examining them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import attrs

from ascend_run.testing.runtime import Examined

from .bisection import smallest
from .covering import NONE_NEEDED, Items, covering_sets

Examine = Callable[[Items], Examined]
"""Whether a set, with whatever it needs, can start, and which of its items are idle in it."""


@attrs.frozen(kw_only=True)
class ExaminedSets:
    """The sets, and what is in none of them."""

    sets: tuple[tuple[str, ...], ...]
    apart: frozenset[Items]
    """Items of which one does nothing beside the others: sets of their own, as within a larger set
    they would hide its pairs. Each is one of ``sets``."""
    refused: Mapping[Items, str]
    """Minimal sets that cannot start -> why."""


def examined_sets(
    items: Sequence[str],
    excluded: Collection[Items],
    examine: Examine,
    *,
    needs: Mapping[str, Items] = NONE_NEEDED,
    first: Sequence[Sequence[str]] = (),
    hints: Collection[Items] = (),
) -> ExaminedSets:
    """Return covering sets that can run.

    Sets are built from the known conflicts. What examining one adds, reduced to the smallest set
    that has it, is a conflict of the next round.

    Args:
        items: As those of ``covering_sets``; so is ``needs``.
        excluded: Sets that are known to be impossible.
        first: Items that have covering sets of their own, which stay as they are whatever else
            there is; later sets have what these lack.
        hints: Sets that were conflicts elsewhere; examined first, which saves rounds.
    """
    known = _Known(examine, needs)
    for cause in hints:
        known.learn(cause)
    while True:
        conflicts = {*excluded, *known.refused, *known.apart}
        drawn: list[tuple[str, ...]] = []
        for part in (*first, items):
            drawn += covering_sets(part, conflicts, needs=needs, covered=drawn)
        sets = [frozenset(found) for found in drawn]
        for found in sets:
            known.learn(found)
        if conflicts == {*excluded, *known.refused, *known.apart}:
            break
    sets += [known.closed(found) for found in sorted(known.apart, key=sorted)]
    return ExaminedSets(
        sets=tuple(tuple(item for item in items if item in found) for found in sets),
        apart=frozenset(known.apart),
        refused=known.refused,
    )


@attrs.define
class _Known:
    """Conflicts that were found by examining sets."""

    examine: Examine
    needs: Mapping[str, Items]
    refused: dict[Items, str] = attrs.field(factory=dict)
    apart: set[Items] = attrs.field(factory=set)

    def learn(self, found: Items) -> None:
        """Examine a set; a problem, or an item that the others make idle, becomes a conflict."""
        examined = self.examine(self.closed(found))
        if examined.problems:
            cause = self._cause(found, lambda part: bool(self.examine(part).problems))
            self.refused[cause] = "; ".join(self.examine(self.closed(cause)).problems)
            return
        for item in sorted(examined.idle & found):
            if item not in self.examine(self.closed({item})).idle:
                others = self._cause(
                    found - {item}, lambda part, item=item: self._is_idle(item, part)
                )
                self.apart.add(others | {item})

    def closed(self, items: Collection[str]) -> Items:
        """Return items with what they need."""
        return frozenset(items).union(*(self.needs.get(item, ()) for item in items))

    def _is_idle(self, item: str, others: Items) -> bool:
        return item in self.examine(self.closed({*others, item})).idle

    def _cause(self, found: Items, has: Callable[[Items], bool]) -> Items:
        return frozenset(smallest(sorted(found), lambda part: has(self.closed(part))))
