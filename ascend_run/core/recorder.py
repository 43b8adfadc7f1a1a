"""Write a run's metrics to the metrics file, the log and the progress bar, on rank 0 only."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from .fingerprint.record import writer as fingerprint_writer
from .log.metrics import MetricsWriter
from .log.progress import Progress

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger


class Recorder:
    """Sink for a run's metrics; this one, of the ranks that do not write, drops them."""

    def readings(self, readings: Mapping[str, Any]) -> None: ...

    def evaluation(self, step: int, loss: float, metrics: Mapping[str, float]) -> None: ...

    def fingerprints(self, entries: Iterable[Mapping[str, Any]]) -> None: ...

    def step_done(self, step: int) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End the run. ``error`` is None if it succeeded."""


class RunRecorder(Recorder):
    """Recorder of the rank that writes. A context manager around the training loop.

    Args:
        start: Step of the checkpoint that the run resumes from; 0 without one.
        total: The run's last step.
    """

    def __init__(self, folder: Path, *, start: int, total: int, log: FilteringBoundLogger) -> None:
        self.metrics = MetricsWriter(folder / "metrics.jsonl", start or None)
        self.fingerprint = fingerprint_writer(folder, start)
        self.progress = Progress(total, start)
        self.log = log
        self.latest: Mapping[str, object] = {}

    def readings(self, readings: Mapping[str, Any]) -> None:
        self.metrics.write(readings)
        self.latest = readings
        loss = readings["loss"]
        if not math.isfinite(loss):
            self.log.warning("loss.not_finite", step=readings["step"], loss=loss)

    def evaluation(self, step: int, loss: float, metrics: Mapping[str, float]) -> None:
        more = {f"eval_{name}": value for name, value in metrics.items()}
        self.metrics.write({"step": step, "eval_loss": loss, **more})
        self.log.info("evaluation.done", step=step, loss=round(loss, 4))

    def fingerprints(self, entries: Iterable[Mapping[str, Any]]) -> None:
        for entry in entries:
            self.fingerprint.write(entry)

    def step_done(self, step: int) -> None:
        self.progress.update(step, self.latest)

    def __enter__(self) -> Self:
        self.progress.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the progress bar; if the run succeeded, write ``finish`` to the metrics file.

        Raises:
            StorageError: The files cannot be written. Suppressed if the run failed, so that the
                run's own error is reported.
        """
        with contextlib.ExitStack() as closing:
            closing.callback(self.metrics.close)
            closing.callback(self.fingerprint.close)
            if error is None:
                self.progress.__exit__()
                self.metrics.event("finish")
                return
            # The run's own error matters more than errors of writing.
            with contextlib.suppress(Exception):
                self.progress.__exit__()
