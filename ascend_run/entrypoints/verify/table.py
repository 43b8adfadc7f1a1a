"""The verdict for a terminal. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from ascend_run.core.verify.verdict import Check, Outcome, Phase, Verdict
from ascend_run.entrypoints.tables import table

_NEXT = {
    Phase.FORWARD: "compare what goes into and comes out of this module on both sides",
    Phase.BACKWARD: (
        "the forward is right: look at this module's backward, and at how its gradients are "
        "reduced over ranks"
    ),
    Phase.OPTIMIZER: (
        "gradients are right: look at parameter groups, the optimizer's step and its gathering"
    ),
}


def text_of(verdict: Verdict) -> Iterator[str]:
    """Checks, the verdict, and what to do next."""
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
            "ok" if check.passed else "WRONG",
            shown_eps(check),
            check.where,
        )
        for check in verdict.checks
    ]
    yield from table(("check", "against", "", "worst (eps)", "where"), rows)
    for check in verdict.checks:
        if not check.passed:
            yield ""
            yield f"{check.name}, against {check.against}:"
            yield from (f"  {detail}" for detail in check.details)
    yield ""
    yield f"verdict: {verdict.sentence()}"
    yield from next_steps(verdict)


def shown_eps(check: Check) -> str:
    """The worst distance in units of rounding."""
    return "0" if check.worst == 0 else f"{check.eps:.3g}"


def next_steps(verdict: Verdict) -> Iterator[str]:
    """What a reader does with the verdict."""
    fault = verdict.fault
    if verdict.outcome is Outcome.BITWISE:
        yield "every bit that was compared is equal"
    elif verdict.outcome is Outcome.WITHIN:
        yield "differences are those of another order of sums; nothing to do"
    if fault is None:
        return
    yield f"why: {fault.why}"
    if fault.suspects:
        yield f"further suspects: {', '.join(fault.suspects[:5])}"
    yield f"next: {_NEXT[fault.phase]}; enable the plugins one by one to see whose it is"
