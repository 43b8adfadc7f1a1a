"""The result of a verification. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

import attrs

VERDICT_SCHEMA: Final = 1
ITSELF: Final = "itself"
"""``Check.against`` of an invariant of a single run."""
FROZEN_CHANGED: Final = "parameters that should not train have changed"
"""``Fault.why`` of a fault that explains what differs in the weights after it."""


class Outcome(StrEnum):
    """The verdict without its fault: the first two are good."""

    BITWISE = "bitwise"
    WITHIN = "within its declared numerics"
    NOT_EXERCISED = "not exercised"
    """No check failed, but something under test did nothing, so nothing is shown about it."""
    DIVERGES = "DIVERGES"


class Phase(StrEnum):
    """Phase of a training step, or of a run."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    RESUME = "resume"
    """Not of a step: a resumed run continues in another way."""


@attrs.frozen(kw_only=True)
class Fault:
    """Where two runs begin to differ, as precisely as it is known."""

    phase: Phase
    module: str
    """Name in the whole model; or, if it is not a module, ``batch``, ``loss``, ``schedule``,
    ``gradient reduction``, ``gradient norm``, ``optimizer`` or ``random streams``; for a resumed
    run, ``data order``, ``checkpoint entry NAME`` or what else was restored wrongly."""
    suspects: tuple[str, ...] = ()
    """Other candidates, the most likely first."""
    why: str = ""
    step: int = 0
    """The training step in which it begins, from 1; 0 if the first batch by itself shows it, or if
    it is not known."""
    in_all_runs: bool = False
    """Whether the compared runs agree with each other, and all differ from the formulas."""


@attrs.frozen(kw_only=True)
class Check:
    """One comparison of two runs, or one invariant of a run."""

    name: str
    against: str
    """Name of the reference, or ``ITSELF``."""
    passed: bool
    worst: float = 0.0
    """The max error."""
    eps: float = 0.0
    """The max error in units of the dtype's eps."""
    tolerance: float = 0.0
    where: str = ""
    """Where the max error is."""
    details: tuple[str, ...] = ()
    """One message per problem."""
    applies: bool = True
    """False if there was nothing to compare; then it is neither passed nor failed."""

    @property
    def state(self) -> str:
        """``ok``, ``WRONG``, or ``-`` if there was nothing to compare."""
        if not self.passed:
            return "WRONG"
        return "ok" if self.applies else "-"


@attrs.frozen(kw_only=True)
class Exercise:
    """Whether something under test acted."""

    subject: str
    """A plugin, or what of the model was to be exercised."""
    exercised: bool
    effects: tuple[str, ...] = ()
    """What it did, compared with the same run without it."""
    why: str = ""
    """Why it is not exercised."""
    fix: str = ""
    """What would exercise it."""


@attrs.frozen(kw_only=True)
class Case:
    """A case in which a fault may hide, such as an expert without tokens."""

    name: str
    occurred: bool | None
    """None if the run cannot have it."""
    detail: str = ""
    """Where it occurred; else, what would make it occur."""


@attrs.frozen(kw_only=True)
class ModuleDeviation:
    """The relative error of one module's moments."""

    module: str
    forward: float | None
    """None if it cannot be compared; likewise ``backward``."""
    backward: float | None


@attrs.frozen(kw_only=True)
class ParameterGroup:
    """Parameters with equal weight decay and learning rate, as the optimizer has them."""

    weight_decay: float
    lr_multiplier: float
    """Factor on the learning rate of the schedule."""
    parameters: tuple[str, ...]


@attrs.frozen(kw_only=True)
class Verdict:
    """The result of a verification."""

    outcome: Outcome
    fault: Fault | None
    checks: tuple[Check, ...]
    modules: tuple[ModuleDeviation, ...]
    """In the order of execution, relative to the plain model on one rank."""
    question: str
    """What was verified, as text."""
    declared: Mapping[str, str]
    """Plugin -> the numerics of its manifest."""
    references: tuple[str, ...]
    notes: tuple[str, ...] = ()
    exercises: tuple[Exercise, ...] = ()
    """Of each plugin under test, and of the model."""
    groups: tuple[ParameterGroup, ...] = ()
    """Of the candidate's optimizer; empty if it does not expose them."""
    cases: tuple[Case, ...] = ()
    """Hard cases of the model and its batches."""

    @property
    def good(self) -> bool:
        return self.outcome in (Outcome.BITWISE, Outcome.WITHIN)

    @property
    def exit_code(self) -> int:
        """Of the command."""
        return 0 if self.good else 1

    def with_exercises(self, exercises: Iterable[Exercise], cases: Iterable[Case]) -> Verdict:
        """Return the verdict with what was exercised, which the outcome depends on."""
        found = tuple(exercises)
        idle = not all(exercise.exercised for exercise in found)
        outcome = Outcome.NOT_EXERCISED if self.good and idle else self.outcome
        return attrs.evolve(self, exercises=found, cases=tuple(cases), outcome=outcome)

    def sentence(self) -> str:
        """The verdict in one line."""
        if self.outcome is Outcome.NOT_EXERCISED:
            idle = [exercise.subject for exercise in self.exercises if not exercise.exercised]
            return f"{self.outcome}: {', '.join(idle)}"
        if self.fault is None:
            return str(self.outcome)
        return f"{self.outcome} at {self.fault.module} ({self.fault.phase})"

    def as_data(self) -> dict[str, object]:
        """Return the verdict as JSON values; infinite errors are None."""
        data = attrs.asdict(self, recurse=True)
        plain: dict[str, object] = _finite(
            {"schema": VERDICT_SCHEMA, "verdict": self.sentence(), **data}
        )
        return plain


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, StrEnum) else value
