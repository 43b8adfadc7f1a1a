"""Compare a run that was stopped and resumed with the same run without a stop, bitwise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import attrs

from ascend_run.tools.verify.capture.training_record import RunState, TrainingRecord

from .readings import shortened
from .run_states import (
    OPTIMIZER,
    PROGRESS,
    STREAMS,
    WEIGHTS,
    Difference,
    differences,
    keys_of,
    kind_of,
    other_attributes,
    owner_of,
    relative_error,
    unused_streams,
)
from .thresholds import FLOAT32_EPS, STOP
from .verdict import Check, Fault, Phase

AGAINST: Final = "the run without a stop"
_DRAWN_ON: Final = {
    "tracker.model-parallel-rng": "tp=2,sp",
    "tracker.expert-parallel-rng": "ep=2",
}
"""Random stream -> a layout in which dropout draws from it."""


@attrs.frozen(kw_only=True)
class ResumedRun:
    """The records of a run in one piece and in two, each by rank."""

    whole: Sequence[TrainingRecord]
    stopped: Sequence[TrainingRecord]
    resumed: Sequence[TrainingRecord]


def compare_resumed(run: ResumedRun) -> tuple[list[Check], Fault | None]:
    """Return the checks, and the fault that explains the failed ones.

    What was restored is compared with what was saved; every step and the end, with the run without
    a stop. A difference of the first kind is in the checkpoint, or in how it is restored. If there
    are only others, training depends on something that no checkpoint has.
    """
    comparison = _Comparison(run)
    checks = [*comparison.checks()]
    return checks, None if all(check.passed for check in checks) else comparison.fault()


class _Comparison:
    def __init__(self, run: ResumedRun) -> None:
        self._run = run
        self._rows = [*_other_rows(run)]
        self._readings = {
            "losses": _other_readings(run, "loss"),
            "gradient norms": _other_readings(run, "grad_norm"),
        }
        resumed = [record.start for record in run.resumed]
        self._restored = differences([r.end for r in run.stopped], resumed, "when restored")
        self._later = differences(_ends(run.whole), _ends(run.resumed), "at the end")

    def checks(self) -> Iterator[Check]:
        yield _check("rows", self._rows)
        for name, problems in self._readings.items():
            yield _check(name, [*problems.values()])
        unused = unused_streams(self._run.stopped)
        streams = {key for key in keys_of(_end(self._run)) if kind_of(key) == STREAMS}
        held = {kind_of(key) for key in keys_of(_end(self._run))}
        if not streams - unused.keys():
            held -= {STREAMS}
        found = [*self._restored, *self._later]
        for kind in dict.fromkeys((WEIGHTS, OPTIMIZER, STREAMS, PROGRESS, *held)):
            check = _check(kind, [d for d in found if kind_of(d.key) == kind])
            yield attrs.evolve(check, applies=kind in held)
        if unused:
            names = ", ".join(map(_with_layout, dict.fromkeys(unused.values())))
            check = _check("unused random streams", [])
            yield attrs.evolve(check, applies=False, where=f"nothing drew from {names}")

    def fault(self) -> Fault:
        if self._rows:
            return _fault("data order", self._rows[0].text)
        if self._restored:
            owners = [*dict.fromkeys(owner_of(difference.key) for difference in self._restored)]
            return _fault(owners[0], self._restored[0].text, owners[1:])
        readings = [item for found in self._readings.values() for item in found.items()]
        step, problem = min(readings, default=(math.inf, None), key=lambda item: item[0])
        text = (problem or self._later[0]).text
        if step <= STOP:
            return _fault("reproducibility", f"two runs differ before the checkpoint: {text}")
        return self._in_no_checkpoint(text)

    def _in_no_checkpoint(self, problem: str) -> Fault:
        why = f"all that is in the checkpoint was restored, but {problem}"
        others = [*other_attributes(_ends(self._run.whole), _ends(self._run.resumed))]
        if others:
            why += f"; {'; '.join(others[:3])}"
        return _fault("state in no checkpoint", why, [line.split()[0] for line in others])


def _with_layout(stream: str) -> str:
    """Add the layout that draws from a stream to its name."""
    layout = _DRAWN_ON.get(stream)
    return stream if layout is None else f"{stream} ({layout} does)"


def _end(run: ResumedRun) -> RunState:
    return run.whole[0].end


def _ends(records: Sequence[TrainingRecord]) -> list[RunState]:
    return [record.end for record in records]


def _other_rows(run: ResumedRun) -> Iterator[Difference]:
    """Yield a difference for each step of a rank that reads other rows, or none."""
    for whole, *parts in zip(run.whole, run.stopped, run.resumed, strict=True):
        begun = parts[1].first_step
        if begun != STOP:
            text = f"rank {whole.rank}: the run was resumed at step {begun}, expected {STOP}"
            yield Difference("rows", text, f"rank {whole.rank}")
        found = {step: trained.rows for part in parts for step, trained in part.steps.items()}
        steps = {tuple(trained.rows): step for step, trained in whole.steps.items()}
        for step, trained in whole.steps.items():
            rows = found.get(step, ())
            if trained.rows and [*rows] == [*trained.rows]:
                continue
            other = steps.get(tuple(rows)) if trained.rows else None
            what = f"the rows of step {other}" if other else "other rows" if rows else "no rows"
            text = f"rank {whole.rank}: step {step} reads {what}"
            yield Difference("rows", text, f"step {step} on rank {whole.rank}")


def _other_readings(run: ResumedRun, name: str) -> Mapping[int, Difference]:
    """Return step -> difference, for each step whose reading differs."""
    parts = (run.stopped[0], run.resumed[0])
    found = {step: getattr(t, name) for part in parts for step, t in part.steps.items()}
    problems = {}
    for step, trained in run.whole[0].steps.items():
        expected = getattr(trained, name)
        if repr(found.get(step)) != repr(expected):  # NaN equals NaN
            text = f"{name} of step {step} is {found.get(step)!r}, not {expected!r}"
            error = relative_error(expected, found.get(step))
            problems[step] = Difference(name, text, f"step {step} on rank 0", error)
    return problems


def _check(name: str, problems: Sequence[Difference]) -> Check:
    """Return the check of what differs; values without a size, such as rows, have no error."""
    measured = [problem for problem in problems if problem.error is not None]
    worst = max(measured, key=lambda problem: problem.error or 0.0, default=None)
    error = 0.0 if worst is None else worst.error or 0.0
    shown = worst or next(iter(problems), None)
    return Check(
        name=f"{name}, resumed",
        against=AGAINST,
        passed=not problems,
        worst=error,
        eps=error / FLOAT32_EPS,
        where="" if shown is None else shown.where,
        details=shortened([problem.text for problem in problems]),
    )


def _fault(module: str, why: str, suspects: Sequence[str] = ()) -> Fault:
    return Fault(phase=Phase.RESUME, module=module, why=why, suspects=tuple(suspects[:5]))
