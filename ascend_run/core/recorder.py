"""Where a run's readings go: the metrics file, the log and the progress bar, on the rank that
writes; nowhere on the others."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from .fingerprint.record import writer as fingerprint_writer
from .log.metrics import MetricsWriter
from .log.progress import Progress


class SilentRecorder:
    """For the ranks that do not write."""

    def readings(self, readings: Mapping[str, Any]) -> None: ...

    def evaluation(self, step: int, loss: float) -> None: ...

    def fingerprints(self, entries: Iterable[Mapping[str, Any]]) -> None: ...

    def step_done(self, step: int) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class RunRecorder:
    """For the rank that writes; enter it for the length of the training.

    Args:
        start: Steps done before, by the checkpoint that the run goes on from.
        total: The run's last step.
    """

    def __init__(self, folder: Path, *, start: int, total: int, log: Any) -> None:
        self.metrics = MetricsWriter(folder / "metrics.jsonl", start or None)
        self.fingerprint = fingerprint_writer(folder, start)
        self.progress = Progress(total, start)
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

    def fingerprints(self, entries: Iterable[Mapping[str, Any]]) -> None:
        for entry in entries:
            self.fingerprint.write(entry)

    def step_done(self, step: int) -> None:
        self.progress.update(step, self.latest)

    def __enter__(self) -> Self:
        self.progress.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the bar, and the file with how the run ended: ``finish`` or ``failure``.

        Raises:
            StorageError: The file system refused; not where the run has failed, whose own error
                is the one to tell.
        """
        with contextlib.ExitStack() as closing:
            closing.callback(self.metrics.close)
            closing.callback(self.fingerprint.close)
            if error is None:
                self.progress.__exit__(None, None, None)
                self.metrics.event("finish")
                return
            # Whatever cannot be written now, the run's error says more.
            with contextlib.suppress(Exception):
                self.progress.__exit__(kind, error, trace)
            with contextlib.suppress(Exception):
                self.metrics.event("failure", error=f"{type(error).__name__}: {error}")
