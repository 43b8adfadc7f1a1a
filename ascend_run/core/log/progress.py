"""How far the run is: a bar on a terminal, a plain line now and then everywhere else."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, Self, TextIO

from .json_values import number

BAR_SECONDS: Final = 0.25
LINE_SECONDS: Final = 10.0
_COST: Final = 500
"""Drawing waits this many times as long as it takes: it costs at most 0.2 % of the run."""


class Progress:
    """Progress of a run towards its last step; enter it for the length of the run.

    ``update`` may be called after every step: between two drawings it keeps what it is given and
    returns, which costs below a microsecond.

    Args:
        total: The last step.
        start: Steps done before (by the checkpoint that the run goes on from).
        stream: Default: standard error, so that standard output stays for results.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        total: int,
        start: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.total = total
        self.step = start
        self._start = start
        self._clock = clock
        self._readings: Mapping[str, Any] = {}
        stream = sys.stderr if stream is None else stream
        self._face = _Bar(total, start, stream) if stream.isatty() else _Lines(stream)
        self._first: tuple[int, float] | None = None
        self._next = -math.inf
        self._drawn: int | None = None

    def update(self, step: int, readings: Mapping[str, Any] | None = None) -> None:
        """A step is done.

        Args:
            step: Steps done in all.
            readings: ``loss``, ``lr`` and ``tokens_per_second`` are shown; None keeps the last.
        """
        self.step = step
        if readings is not None:
            self._readings = readings
        now = self._clock()
        if self._first is None:
            # The first step holds warm-up and compilation; the estimate begins after it.
            self._first = (step, now)
        if now >= self._next:
            self._draw(now)

    def __enter__(self) -> Self:
        self._face.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._drawn != self.step and self.step != self._start:
            self._draw(self._clock())
        self._face.close()

    def _draw(self, now: float) -> None:
        self._drawn = self.step
        self._face.draw(self.step, self.total, shown(self._readings), self._seconds_left(now))
        done = self._clock()
        self._next = done + max(self._face.pause_seconds, _COST * (done - now))

    def _seconds_left(self, now: float) -> float | None:
        if self._first is None or self.step <= self._first[0]:
            return None
        return (now - self._first[1]) / (self.step - self._first[0]) * (self.total - self.step)


def shown(readings: Mapping[str, Any]) -> str:
    """The readings that a user watches: ``loss 3.2145  lr 2.91e-04  12,345 tokens/s``."""
    forms = {"loss": "loss {:.4f}", "lr": "lr {:.2e}", "tokens_per_second": "{:,.0f} tokens/s"}
    values = {name: number(readings.get(name)) for name in forms}
    return "  ".join(forms[name].format(v) for name, v in values.items() if v is not None)


def duration(seconds: float) -> str:
    """``1:02:03``: hours, minutes and seconds."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


class _Lines:
    """Plain lines, for files and pipes."""

    pause_seconds = LINE_SECONDS

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def open(self) -> None:
        """Nothing to prepare."""

    def draw(self, step: int, total: int, readings: str, seconds_left: float | None) -> None:
        left = "" if seconds_left is None else f"{duration(seconds_left)} left"
        parts = [f"step {step}/{total}", readings, left]
        print("  ".join(part for part in parts if part), file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing to clean up."""


class _Bar:
    """One line that is redrawn in place."""

    pause_seconds = BAR_SECONDS

    def __init__(self, total: int, start: int, stream: TextIO) -> None:
        from rich import progress
        from rich.console import Console

        # auto_refresh would draw from a thread of its own, ten times a second.
        self._progress = progress.Progress(
            progress.TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            progress.BarColumn(bar_width=None),
            progress.TextColumn("{task.fields[readings]}", markup=False),
            progress.TextColumn("{task.fields[left]}", style="dim", markup=False),
            console=Console(file=stream),
            auto_refresh=False,
            # What is printed on a terminal goes above the bar; into a pipe, where it was meant.
            redirect_stdout=sys.stdout.isatty(),
            expand=True,
        )
        self._task = self._progress.add_task(
            "train", total=total, completed=start, readings="", left=""
        )

    def open(self) -> None:
        self._progress.start()

    def draw(self, step: int, total: int, readings: str, seconds_left: float | None) -> None:
        left = "" if seconds_left is None else f"{duration(seconds_left)} left"
        self._progress.update(self._task, completed=step, readings=readings, left=left)
        self._progress.refresh()

    def close(self) -> None:
        self._progress.stop()
