"""Scores of a run's checkpoints, in a file of the run folder: one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import attrs

from .record_reading import read_record
from .step_metrics import StepMetrics

FILE_NAME: Final = "evaluations.jsonl"
_STEPS: Final = 2**53
"""Exclusive upper bound of steps, as in the file of metrics."""


@attrs.frozen(kw_only=True)
class EvaluatedCheckpoint:
    """One line."""

    step: int
    name: str = ""
    """Of the evaluation, where a run has several."""
    asked: Mapping[str, object] = attrs.field(factory=dict)
    """What was asked: the data, the tasks and their options."""
    checkpoint: str = ""
    """SHA-256 of its manifest: a resumed run may come to the same step again."""
    values: Mapping[str, float] = attrs.field(factory=dict)
    """Score -> value."""


def read_evaluations(folder: Path) -> tuple[EvaluatedCheckpoint, ...]:
    """Return the valid lines of a run folder in their order; none if there is no file."""
    try:
        text = (folder / FILE_NAME).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    found = []
    for line in text.split("\n"):
        try:
            found.append(read_record(json.loads(line), EvaluatedCheckpoint))
        except (ValueError, RecursionError, TypeError):
            continue  # cut off when it was written, or of no step
    return tuple(one for one in found if 0 <= one.step < _STEPS)


def scores_by_step(evaluations: Iterable[EvaluatedCheckpoint]) -> tuple[StepMetrics, ...]:
    """Return the scores in the order of the steps; of several of one step and name, the last."""
    by_step: dict[int, dict[str, object]] = {}
    for one in evaluations:
        prefix = f"{one.name}: " if one.name else ""
        found = by_step.setdefault(one.step, {})
        found |= {f"{prefix}{score}": value for score, value in one.values.items()}
    return tuple(StepMetrics(step, by_step[step]) for step in sorted(by_step))
