"""Run a search with ranks of this machine and a journal in the current folder."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs
import click

from ascend_run.launch.alone import sigterm_unwinds
from ascend_run.plugin_api.errors import DataError
from ascend_run.tools.pages.step_differences import PARTS, FirstDifference
from ascend_run.tools.verify.command import BUILT_IN_SECONDS, FILE_SECONDS, check_data
from ascend_run.tools.verify.compare.thresholds import STEPS
from ascend_run.tools.verify.questions import Question
from ascend_run.tools.verify.ranks import Ranks
from ascend_run.tools.verify.shared_ranks import SharedRanks

from .bisection import Bisection, bisect
from .choices import Compares
from .comparing import Comparer
from .journal import Journal
from .mixing import Mixing
from .recorded_runs import NOTHING, check_same_data, first_difference, not_searched, read_runs
from .run_comparing import RunComparer

MOST_STEPS: Final = 20
"""Optimizer steps of a comparison at most; the runs may part later."""


@attrs.frozen(kw_only=True)
class Options:
    """How to search."""

    timeout: float | None
    """Limit of a compared run; None: the default of ``verify``. Unit: seconds."""
    fresh: bool
    """Whether to ignore the journal."""


def search_plugins(question: Question, options: Options) -> Bisection:
    """Search the plugins of one run."""

    def comparer(ranks: Ranks) -> tuple[Comparer, Mapping[str, object]]:
        compare = Comparer(question, ranks)
        if question.file is not None:
            check_data(compare.prepared)
        return compare, compare.identity()

    seconds = BUILT_IN_SECONDS if question.file is None else FILE_SECONDS
    return _search(comparer, options, seconds)


def search_runs(paths: tuple[Path, Path], options: Options) -> Bisection:
    """Search what makes two runs part.

    Raises:
        AscendRunError: They cannot be compared, or there is nothing to search.
    """
    one, other = read_runs(paths)
    check_same_data(one, other)
    first, notes = first_difference(one, other)
    notes = (*notes, *not_searched(one, other))
    step = 0 if first is None else first.step
    mixing = Mixing(one, other, max(STEPS, min(step, MOST_STEPS)))
    if not mixing.choices:
        raise DataError(f"{NOTHING}: the configs of the runs are the same", (*mixing.notes, *notes))

    def comparer(ranks: Ranks) -> tuple[RunComparer, Mapping[str, object]]:
        check_data(mixing.prepared[0])
        compare = RunComparer(mixing, ranks)
        return compare, compare.identity()

    result = _search(comparer, options, FILE_SECONDS)
    # Within tolerances, the runs themselves may differ earlier, by rounding.
    of_runs = first is not None and (not mixing.tolerant or result.step is None)
    return attrs.evolve(
        result,
        step=first.step if first is not None and of_runs else result.step,
        runs=(str(paths[0]), str(paths[1])),
        notes=(*_how(mixing, first), *mixing.notes, *notes),
    )


def _how(mixing: Mixing, first: FirstDifference | None) -> Sequence[str]:
    """Return notes on how the runs were compared."""
    how = "bitwise"
    if mixing.tolerant:
        how = f"within the tolerances of verify, for {', '.join(mixing.tolerant)}"
    notes = [f"compared over {mixing.steps} steps, {how}"]
    if first is not None:
        parts = ", ".join(PARTS[part] for part in first.parts)
        notes.append(f"the runs themselves differ from step {first.step} on, first in: {parts}")
    return notes


def _search(
    comparer: Callable[[Ranks], tuple[Compares, Mapping[str, object]]],
    options: Options,
    seconds: float,
) -> Bisection:
    """
    Args:
        comparer: Returns what compares on these ranks, and what its results depend on.
        seconds: Default limit of a run.
    """
    begin = time.monotonic()

    def report(number: int, changes: str) -> None:
        elapsed = time.monotonic() - begin
        print(f"bisect: {elapsed:6.1f} s, {number}: {changes}", file=sys.stderr, flush=True)

    with sigterm_unwinds(), SharedRanks(options.timeout or seconds) as ranks:
        compare, identity = comparer(ranks)
        journal = Journal(Path.cwd(), identity)
        if options.fresh:
            journal.remove()
        elif journal.path.exists():
            click.echo(f"bisect: continues {journal.path.name} (--fresh starts over)", err=True)
        return bisect(compare, journal, report)
