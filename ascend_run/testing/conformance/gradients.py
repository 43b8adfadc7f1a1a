"""Check that gradients are derivatives, which comparing two runs of one model cannot show."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ascend_run.testing.gradients.differences import Derivative

from .check import DoesNotApply
from .numbers import parts_of, stepping, tried
from .scenarios import Scenario, scenarios
from .subject import Subject


def are_derivatives(subject: Subject) -> Iterator[str]:
    """Check gradients against differences: every parameter's, of each term of the loss, of a plugin
    that changes the model; the backward of autograd functions in its run; the backward of its
    attention kernel, also on two ranks."""
    chosen = [*_scenarios(subject)]
    if not chosen:
        raise DoesNotApply("it has no effect on one rank, and no attention kernel")
    found: list[str] = []
    estimated: list[str] = []
    for scenario in chosen:
        trial = stepping(subject, scenario, 0, scenario.chosen)
        outcome = subject.means.run(trial, scenario.world_size)[0]
        found += (f"{scenario}, {problem}" for problem in problems(outcome.derivatives))
        estimated += outcome.estimated
    if estimated and not found:
        raise DoesNotApply(f"its gradients are estimates: {'; '.join(estimated)}")
    yield from found


def _scenarios(subject: Subject) -> Iterator[Scenario]:
    """Yield scenarios in which it has something to compare, those of KIT-PARITY first; a plugin
    that changes the model is tried in every model."""
    shared = tried(subject)
    others = scenarios(subject) if "parameters" in parts_of(subject, 1) else []
    alone = [scenario for scenario in others if scenario.world_size == 1]
    for scenario in (*shared, *(scenario for scenario in alone if scenario not in shared)):
        if not scenario.idle and parts_of(subject, scenario.world_size):
            yield scenario


def problems(derivatives: Sequence[Derivative]) -> Iterator[str]:
    """Yield a message for each wrong derivative, the largest error first: a wrong backward spreads
    to the gradients of all earlier modules. And one if none could be measured."""
    wrong = [derivative for derivative in derivatives if not derivative.agrees]
    for derivative in sorted(wrong, key=lambda one: one.error or math.inf, reverse=True):
        yield derivative.problem()
    if derivatives and not any(derivative.is_measured for derivative in derivatives):
        yield (
            "no gradient could be compared with differences of the loss: two values of it along a "
            "line are too far apart; is it rounded, or not the same twice?"
        )
