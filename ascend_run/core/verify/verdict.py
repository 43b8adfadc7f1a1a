"""What a verification comes to. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

import attrs

VERDICT_SCHEMA: Final = 1
ITSELF: Final = "itself"
"""What a check is against that must hold inside of one run."""


class Outcome(StrEnum):
    """The two good ones and the bad one."""

    BITWISE = "bitwise"
    WITHIN = "within its declared numerics"
    DIVERGES = "DIVERGES"


class Phase(StrEnum):
    """Where in a step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@attrs.frozen(kw_only=True)
class Fault:
    """Where two runs begin to differ, as near as it can be told."""

    phase: Phase
    module: str
    """Of the whole model, or what it is where it is no module (``batch``, ``loss``,
    ``gradient reduction``, ``optimizer``, ``random streams``)."""
    suspects: tuple[str, ...] = ()
    """Further ones, the likeliest first."""
    why: str = ""


@attrs.frozen(kw_only=True)
class Check:
    """One thing that was compared."""

    name: str
    against: str
    """Which run, or ``ITSELF``."""
    passed: bool
    worst: float = 0.0
    """The largest distance."""
    eps: float = 0.0
    """The same in units of the dtype's rounding."""
    tolerance: float = 0.0
    where: str = ""
    """Of the worst."""
    details: tuple[str, ...] = ()
    """A sentence for each thing that is wrong."""


@attrs.frozen(kw_only=True)
class ModuleDeviation:
    """How far one module's moments lie apart, in the order of execution."""

    module: str
    forward: float | None
    """None where it cannot be compared."""
    backward: float | None


@attrs.frozen(kw_only=True)
class Verdict:
    """The answer to one question."""

    outcome: Outcome
    fault: Fault | None
    checks: tuple[Check, ...]
    modules: tuple[ModuleDeviation, ...]
    """Against the plain model on one rank."""
    question: str
    """What was compared, in words."""
    declared: Mapping[str, str]
    """Plugin -> the numerics of its manifest."""
    references: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        return self.outcome is not Outcome.DIVERGES

    def sentence(self) -> str:
        """The line that a reader looks for."""
        if self.fault is None:
            return str(self.outcome)
        return f"{self.outcome} at {self.fault.module} ({self.fault.phase})"

    def as_data(self) -> dict[str, Any]:
        """For JSON; infinite distances are None."""
        data = attrs.asdict(self, recurse=True)
        plain: dict[str, Any] = _finite(
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
