"""The verdict as text. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from ascend_run.tools.terminal.tables import table
from ascend_run.tools.verify.compare.verdict import Check, Exercise, Outcome, Phase, Verdict

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


def text_of(verdict: Verdict) -> Iterator[str]:
    """Yield the lines: checks, the verdict, and what to do next."""
    yield f"verify {verdict.question}"
    for name, numerics in verdict.declared.items():
        yield f"  {name} declares {numerics}"
    for note in verdict.notes:
        yield f"  note: {note}"
    yield ""
    rows = [
        (
            check.name,
            check.against,
            check.state,
            shown_eps(check) if check.applies else "",
            check.where,
        )
        for check in verdict.checks
    ]
    yield from table(("check", "against", "", "max error (eps)", "where"), rows)
    for check in verdict.checks:
        if not check.passed:
            yield ""
            yield f"{check.name}, against {check.against}:"
            yield from (f"  {detail}" for detail in check.details)
    if verdict.exercises:
        yield ""
    for exercise in verdict.exercises:
        yield shown_exercise(exercise)
    yield ""
    yield f"verdict: {verdict.sentence()}"
    yield from next_steps(verdict)


def shown_exercise(exercise: Exercise) -> str:
    """Format whether something under test acted."""
    if exercise.exercised:
        return f"{exercise.subject}: exercised ({'; '.join(exercise.effects)})"
    return f"{exercise.subject}: not exercised: {exercise.why}; {exercise.fix}"


def shown_eps(check: Check) -> str:
    """Format the max error in units of eps."""
    return "0" if check.worst == 0 else f"{check.eps:.3g}"


def next_steps(verdict: Verdict) -> Iterator[str]:
    """Yield what to do after the verdict."""
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
    if fault.suspects:
        yield f"further suspects: {', '.join(fault.suspects[:5])}"
    yield f"next: {_NEXT[fault.phase]}; enable the plugins one by one to find the cause"
