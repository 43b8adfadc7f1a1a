"""Search the choices that make a run diverge, and keep the results. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from .choices import Choice, Compared, Compares, State
from .journal import Journal
from .search import smallest_failing

Report = Callable[[int, str], None]
"""Progress callback: number of the comparison, and what is compared."""
SCHEMA = 2


@attrs.frozen(kw_only=True)
class Bisection:
    """The result of a search."""

    choices: tuple[Choice, ...]
    culprits: tuple[str, ...] | None
    """Choices that make the run diverge, only all of them together; empty if it diverges without
    any of them; None if it does not diverge."""
    last: Compared
    """The comparison that shows it."""
    tried: tuple[Compared, ...]
    """All comparisons, in order."""
    step: int | None
    """The first step in which the runs differ, from 1; 0: before the first."""
    runs: tuple[str, str] | None = None
    """Folders of the two runs; None if plugins of one run were searched."""
    notes: tuple[str, ...] = ()

    def as_data(self) -> dict[str, object]:
        """Return the result as JSON values."""
        return {"schema": SCHEMA, **attrs.asdict(self)}


def bisect(compare: Compares, journal: Journal, report: Report) -> Bisection:
    """Return the choices that make the run diverge.

    Comparisons in the journal are not repeated; it is removed at the end.
    """
    known: dict[frozenset[str], Compared] = {}
    earlier = {compared.changes: compared for compared in journal.read()}
    tried: list[Compared] = []

    def compared_with(names: Sequence[str]) -> Compared:
        key = frozenset(names)
        if key not in known:
            changes = compare.with_needed(names)
            if changes not in earlier:
                report(len(tried) + 1, ", ".join(changes) or "none")
                earlier[changes] = compare(names)
                journal.append(earlier[changes])
            known[key] = earlier[changes]
            if known[key] not in tried:
                tried.append(known[key])
        return known[key]

    def diverges(names: Sequence[str]) -> bool:
        return compared_with(names).state is State.DIVERGES

    names = [choice.name for choice in compare.choices]
    culprits = smallest_failing(names, diverges) if diverges(names) else None
    last = compared_with(names if culprits is None else culprits)
    journal.remove()
    return Bisection(
        choices=tuple(compare.choices),
        culprits=culprits,
        last=last,
        tried=tuple(tried),
        step=last.step,
    )
