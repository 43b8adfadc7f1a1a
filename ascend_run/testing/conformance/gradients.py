"""Check that gradients are derivatives, which comparing two runs of one model cannot show."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import attrs

from ascend_run.plugin_api.manifest import Numerics
from ascend_run.testing.gradients.differences import Derivative

from .check import DoesNotApply
from .scenarios import Scenario, scenarios
from .subject import Subject


def are_derivatives(subject: Subject) -> Iterator[str]:
    """Check every parameter's gradient, of each term of the loss, against differences of the loss,
    on one rank."""
    kind, numerics = subject.facts.kind, subject.manifest.numerics
    if kind == "platform" or (kind == "feature" and numerics is not Numerics.MODEL):
        raise DoesNotApply("its gradients are compared with those of a run without it")
    alone = [scenario for scenario in scenarios(subject) if scenario.world_size == 1]
    active = [scenario for scenario in alone if not scenario.idle]
    if not active:
        raise DoesNotApply("it has no effect in any trial on one rank that is allowed")
    for scenario in active:
        yield from (f"{scenario}, {problem}" for problem in _wrong(subject, scenario))


def _wrong(subject: Subject, scenario: Scenario) -> Iterator[str]:
    trial = attrs.evolve(scenario.chosen, counted=False, by_differences=True)
    (outcome,) = subject.means.run(trial, 1)
    yield from problems(outcome.derivatives)


def problems(derivatives: Sequence[Derivative]) -> Iterator[str]:
    """Yield a message for each wrong derivative, the largest error first: a wrong backward spreads
    to the gradients of all earlier modules. And one if none could be measured."""
    wrong = [derivative for derivative in derivatives if not derivative.agrees]
    for derivative in sorted(wrong, key=lambda one: one.error or math.inf, reverse=True):
        yield derivative.problem()
    if not any(derivative.is_measured for derivative in derivatives):
        yield (
            "no gradient could be compared with differences of the loss: two values of it along a "
            "line are too far apart; is it rounded, or not the same twice?"
        )
