"""Search the plugins that make a run diverge, and keep the results. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import attrs

from .comparing import Compared, State
from .journal import Journal
from .search import smallest_failing

Report = Callable[[int, str], None]
"""Progress callback: number of the comparison, and what is compared."""


class Compares(Protocol):
    """Compares sets of features, as ``Comparer``."""

    @property
    def choices(self) -> Sequence[str]: ...

    def enabled(self, features: Collection[str]) -> tuple[str, ...]: ...

    def __call__(self, features: Collection[str]) -> Compared: ...


@attrs.frozen(kw_only=True)
class Bisection:
    """The result of a search."""

    choices: tuple[str, ...]
    culprits: tuple[str, ...] | None
    """Features that make the run diverge, only all of them together; empty if it diverges without
    any feature; None if it does not diverge."""
    last: Compared
    """The comparison that shows it."""
    tried: tuple[Compared, ...]
    """All comparisons, in order."""

    def as_data(self) -> dict[str, object]:
        """Return the result as JSON values."""
        return {"schema": 1, **attrs.asdict(self)}


def bisect(compare: Compares, journal: Journal, report: Report) -> Bisection:
    """Return the features that make the run diverge.

    Comparisons in the journal are not repeated; it is removed at the end.
    """
    known: dict[frozenset[str], Compared] = {}
    earlier = {compared.enabled: compared for compared in journal.read()}
    tried: list[Compared] = []

    def compared_with(features: Sequence[str]) -> Compared:
        key = frozenset(features)
        if key not in known:
            enabled = compare.enabled(features)
            report(len(tried) + 1, ", ".join(enabled) or "none")
            if enabled not in earlier:
                earlier[enabled] = compare(features)
                journal.append(earlier[enabled])
            known[key] = earlier[enabled]
            if known[key] not in tried:
                tried.append(known[key])
        return known[key]

    def diverges(features: Sequence[str]) -> bool:
        return compared_with(features).state is State.DIVERGES

    culprits = smallest_failing(compare.choices, diverges) if diverges(compare.choices) else None
    last = compared_with(compare.choices if culprits is None else culprits)
    journal.remove()
    return Bisection(
        choices=tuple(compare.choices), culprits=culprits, last=last, tried=tuple(tried)
    )
