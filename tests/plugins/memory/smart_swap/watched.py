"""A trial in which every planned step is looked at."""

from __future__ import annotations

from typing import TypeAlias
from unittest.mock import patch

from ascend_run.plugins.memory.smart_swap.planned_step import PlannedStep
from ascend_run.testing.runtime import RankOutcome, Trial, run_trial

Seen: TypeAlias = tuple[bool, int, int, int]
"""Of a planned step: whether it came as planned, bytes sent, late fetches, storages held."""


def watched_trial(trial: Trial) -> tuple[RankOutcome, list[Seen]]:
    """Return the outcome, and what each planned step but the last one did. A rank's job."""
    seen: list[Seen] = []
    finish = PlannedStep.finish

    def look(step: PlannedStep) -> None:
        finish(step)
        seen.append((step.as_planned, step.sent_bytes, step.late_fetches, len(step.held)))

    with patch.object(PlannedStep, "finish", look):
        return run_trial(trial), seen
