"""The verdict as text. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ascend_run.tools.terminal.tables import table
from ascend_run.tools.verify.compare.verdict import Case, Check, Exercise, Outcome, Phase, Verdict

_NEXT = {
    Phase.FORWARD: "compare the inputs and outputs of this module in both runs",
    Phase.BACKWARD: (
        "the forward is correct: check this module's backward, and how its gradients are reduced "
        "over ranks"
    ),
    Phase.OPTIMIZER: (
        "the gradients are correct: check parameter groups, the optimizer step and the parameter "
        "all-gather"
    ),
    Phase.RESUME: (
        "a run without a stop is correct: check what the checkpoint holds, and what is restored"
    ),
}


_NEXT_IN_ALL_RUNS: Final = (
    "all compared runs agree with each other, so neither the layout nor its collectives are the "
    "cause: compare the code with the formula (docs/verify.md, The oracle)"
)
CHECK_COLUMNS: Final = ("check", "against", "", "max error", "tolerance", "where")


def text_of(verdict: Verdict, *, details: bool = False) -> Iterator[str]:
    """Yield the lines: the verdict and what to do next, what was exercised, then the checks.

    Args:
        details: Whether all problems of a failed check are listed, and the optimizer's groups.
    """
    yield f"verify {verdict.question}"
    yield ""
    yield f"verdict: {verdict.sentence()}"
    yield from next_steps(verdict)
    yield ""
    yield from map(shown_exercise, verdict.exercises)
    yield from shown_cases(verdict.cases)
    if verdict.exercises or verdict.cases:
        yield ""
    for name, numerics in verdict.declared.items():
        yield f"{name} declares {numerics}"
    for note in verdict.notes:
        yield f"note: {note}"
    if verdict.declared or verdict.notes:
        yield ""
    yield from table(CHECK_COLUMNS, [check_row(check) for check in verdict.checks])
    failed = [check for check in verdict.checks if check.details and not check.passed]
    for check in failed if details else ():
        yield ""
        yield f"{check.name}, against {check.against}:"
        yield from (f"  {detail}" for detail in check.details)
    if failed and not details:
        yield ""
        yield "--details lists what differs"
    if details and verdict.groups:
        yield ""
        rows = [
            (f"{group.weight_decay:g}", f"x {group.lr_multiplier:g}", f"{len(group.parameters)}")
            for group in verdict.groups
        ]
        yield from table(("weight decay", "learning rate", "parameters"), rows)


def shown_exercise(exercise: Exercise) -> str:
    """Format whether something under test acted."""
    if exercise.exercised:
        return f"{exercise.subject}: exercised ({'; '.join(exercise.effects)})"
    return f"{exercise.subject}: not exercised: {exercise.why}; {exercise.fix}"


def check_row(check: Check) -> tuple[str, ...]:
    """Return the cells of a check, for ``CHECK_COLUMNS``."""
    compares_numbers = check.applies and (check.tolerance > 0 or check.worst > 0)
    return (
        check.name,
        check.against,
        check.state,
        shown_error(check.worst) if compares_numbers else "",
        f"{check.tolerance:.0e}" if check.tolerance > 0 else "",
        check.where,
    )


def shown_error(error: float) -> str:
    """Format a relative error."""
    return "0" if error == 0 else f"{error:.1e}"


def shown_cases(cases: Sequence[Case]) -> Iterator[str]:
    """Yield which hard cases occurred, which did not, and which the run cannot have."""
    for title, occurred in (
        ("hard cases that occurred", True),
        ("that did not occur", False),
        ("not applicable", None),
    ):
        found = [case for case in cases if case.occurred is occurred]
        if found:
            shows_fix = not occurred
            names = (f"{c.name} ({c.detail})" if c.detail and shows_fix else c.name for c in found)
            yield f"{title}: {', '.join(names)}"


def next_steps(verdict: Verdict) -> Iterator[str]:
    """Yield why the verdict is as it is, and what to do next."""
    fault = verdict.fault
    if verdict.outcome is Outcome.BITWISE:
        yield "all compared values are bitwise equal"
    elif verdict.outcome is Outcome.WITHIN:
        yield "differences are within rounding, as from a different reduction order; nothing to do"
    elif verdict.outcome is Outcome.NOT_EXERCISED:
        yield "no check failed, but what did nothing is not verified"
    if fault is None:
        return
    yield f"why: {fault.why}"
    if (line := _first_problem(verdict.checks)) is not None:
        yield line
    yield f"next: {_NEXT_IN_ALL_RUNS if fault.in_all_runs else _NEXT[fault.phase]}"
    if len(verdict.declared) > 1:
        yield f"which plugin: ascend-run bisect --enable {','.join(verdict.declared)}"
    if fault.suspects:
        yield f"further suspects: {', '.join(fault.suspects[:5])}"


def _first_problem(checks: Sequence[Check]) -> str | None:
    """Describe the first problem of the first failed check."""
    for check in checks:
        if not check.passed and check.details:
            return f"shown by: {check.name}, against {check.against}: {check.details[0]}"
    return None
