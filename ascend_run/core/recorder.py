"""Where a run's readings go: the metrics file, the log and the progress bar, on the rank that
writes; nowhere on the others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .log.metrics import MetricsWriter
from .log.progress import Progress


class SilentRecorder:
    """For the ranks that do not write."""

    def readings(self, readings: Mapping[str, Any]) -> None: ...

    def evaluation(self, step: int, loss: float) -> None: ...

    def step_done(self, step: int) -> None: ...

    def close(self, event: str, **fields: Any) -> None: ...


class RunRecorder:
    """For the rank that writes.

    Args:
        start: Steps done before, by the checkpoint that the run goes on from.
        total: The run's last step.
    """

    def __init__(self, folder: Path, *, start: int, total: int, log: Any) -> None:
        self.metrics = MetricsWriter(folder / "metrics.jsonl", start or None)
        self.progress = Progress(total, start)
        self.progress.__enter__()
        self.log = log
        self.latest: Mapping[str, Any] = {}

    def readings(self, readings: Mapping[str, Any]) -> None:
        self.metrics.write(readings)
        self.latest = readings
        loss = readings["loss"]
        if not math.isfinite(loss):
            self.log.warning("loss.not_finite", step=readings["step"], loss=loss)

    def evaluation(self, step: int, loss: float) -> None:
        self.metrics.write({"step": step, "eval_loss": loss})
        self.log.info("evaluation.done", step=step, loss=round(loss, 4))

    def step_done(self, step: int) -> None:
        self.progress.update(step, self.latest)

    def close(self, event: str, **fields: Any) -> None:
        """End the bar and the file with how the run ended: ``finish`` or ``failure``."""
        self.progress.__exit__(None, None, None)
        self.metrics.event(event, **fields)
        self.metrics.close()
