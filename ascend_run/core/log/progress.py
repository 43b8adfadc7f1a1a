"""Progress display: a bar on a terminal, occasional plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Self, TextIO

from .json_values import number

BAR_SECONDS: Final = 0.25
LINE_SECONDS: Final = 10.0
_COST: Final = 500
"""Minimum pause between redraws, in multiples of the drawing time: costs at most 0.2 %."""


class Progress:
    """Progress of a run; a context manager around the run.

    ``update`` may be called after every step: between redraws it only stores its arguments, which
    takes less than a microsecond.

    Args:
        total: The last step.
        start: Step of the checkpoint that the run resumes from; 0 without one.
        stream: Default: standard error, which leaves standard output to results.
        clock: Monotonic time. Unit: seconds.
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
        self._readings: Mapping[str, object] = {}
        stream = sys.stderr if stream is None else stream
        self._display = _Bar(total, start, stream) if stream.isatty() else _Lines(stream)
        self._first: tuple[int, float] | None = None
        self._next = -math.inf
        self._drawn: int | None = None

    def update(self, step: int, readings: Mapping[str, Any] | None = None) -> None:
        """Report a finished step.

        Args:
            step: Total number of steps done.
            readings: Metrics; ``loss``, ``lr`` and ``tokens_per_second`` are shown. None keeps the
                last.
        """
        self.step = step
        if readings is not None:
            self._readings = readings
        now = self._clock()
        if self._first is None:
            # The first step includes warm-up and compilation; the estimate starts after it.
            self._first = (step, now)
        if now >= self._next:
            self._draw(now)

    def __enter__(self) -> Self:
        self._display.open()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._drawn != self.step and self.step != self._start:
            self._draw(self._clock())
        self._display.close()

    def _draw(self, now: float) -> None:
        self._drawn = self.step
        self._display.draw(
            self.step, self.total, format_readings(self._readings), self._seconds_left(now)
        )
        done = self._clock()
        self._next = done + max(self._display.pause_seconds, _COST * (done - now))

    def _seconds_left(self, now: float) -> float | None:
        if self._first is None or self.step <= self._first[0]:
            return None
        return (now - self._first[1]) / (self.step - self._first[0]) * (self.total - self.step)


def format_readings(readings: Mapping[str, object]) -> str:
    """Format the main metrics: ``loss 3.2145  lr 2.91e-04  12,345 tokens/s``."""
    forms = {"loss": "loss {:.4f}", "lr": "lr {:.2e}", "tokens_per_second": "{:,.0f} tokens/s"}
    values = {name: number(readings.get(name)) for name in forms}
    return "  ".join(forms[name].format(v) for name, v in values.items() if v is not None)


def duration(seconds: float) -> str:
    """Format a duration as hours, minutes and seconds: ``1:02:03``."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


class _Lines:
    """Plain lines, for files and pipes."""

    pause_seconds = LINE_SECONDS

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def open(self) -> None:
        """No-op."""

    def draw(self, step: int, total: int, readings: str, seconds_left: float | None) -> None:
        left = "" if seconds_left is None else f"{duration(seconds_left)} left"
        parts = [f"step {step}/{total}", readings, left]
        print("  ".join(part for part in parts if part), file=self._stream, flush=True)

    def close(self) -> None:
        """No-op."""


class _Bar:
    """One line that is redrawn in place."""

    pause_seconds = BAR_SECONDS

    def __init__(self, total: int, start: int, stream: TextIO) -> None:
        from rich import progress
        from rich.console import Console

        # auto_refresh would redraw from its own thread, ten times a second.
        self._progress = progress.Progress(
            progress.TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            progress.BarColumn(bar_width=None),
            progress.TextColumn("{task.fields[readings]}", markup=False),
            progress.TextColumn("{task.fields[left]}", style="dim", markup=False),
            console=Console(file=stream),
            auto_refresh=False,
            # On a terminal, redirect prints above the bar; leave a piped standard output alone.
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
