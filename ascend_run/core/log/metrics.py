"""``metrics.jsonl``: one JSON object per logged step, append-only, across any number of resumes.

Lines with a ``step`` are metrics; lines with an ``event`` are about the run: ``start``, ``resume``
(``step``: the checkpoint it resumes from), ``finish`` and ``failure`` (``error``). Lines that an
earlier attempt wrote for steps after the checkpoint stay in the file; the reader skips them. Every
line has a ``time``, in seconds since 1970.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from ascend_run.plugin_api.errors import DataError

from .append import AppendedLines
from .json_values import to_json

Record = Mapping[str, Any]

_BEGINNINGS: Final = ("start", "resume")
_STEPS: Final = 2**53
"""Exclusive upper bound of steps; larger integers are inexact in parsers that use floats."""


class MetricsWriter(AppendedLines):
    """Append metrics; each line is in the file when ``write`` returns.

    Args:
        path: The file; created if missing.
        resume_step: Step of the checkpoint that the run resumes from; None for a new run, which
            supersedes the file's content.
        about: Additional fields of the event that starts the attempt.

    Raises:
        StorageError: The file cannot be written; from any method.
    """

    def __init__(
        self, path: Path, resume_step: int | None = None, about: Record | None = None
    ) -> None:
        super().__init__(path)
        self.end_torn_line()
        if resume_step is None:
            self.event("start", **(about or {}))
        else:
            self.event("resume", step=resume_step, **(about or {}))

    def write(self, readings: Mapping[str, object]) -> None:
        """Append the metrics of one step; they must contain ``step``."""
        assert "step" in readings, f"readings without a step: {sorted(readings)}"
        self.append(to_json({**readings, "time": round(time.time(), 3)}))

    def event(self, name: str, **fields: Any) -> None:
        """Append an event of the run, such as ``finish`` or ``failure``."""
        self.append(to_json({"event": name, **fields, "time": round(time.time(), 3)}))


def add_failure(path: Path, error: str, *, lost_peer: bool = False) -> None:
    """Append a failure on behalf of ranks that may not have been able to.

    The last event counts, and the launcher knows which rank failed first.

    Args:
        lost_peer: The failure was only a lost peer; it is not appended after another failure.

    Raises:
        StorageError: The file cannot be written.
    """
    if lost_peer and path.exists():
        events = read_metrics(path).events
        if events and events[-1]["event"] == "failure":
            return
    with AppendedLines(path) as lines:
        lines.end_torn_line()
        lines.append(to_json({"event": "failure", "error": error, "time": round(time.time(), 3)}))


@attrs.frozen(kw_only=True)
class MetricsHistory:
    """Content of ``metrics.jsonl`` for the run's current history."""

    records: tuple[Record, ...] = ()
    """Metrics in step order, without superseded ones."""
    events: tuple[Record, ...] = ()
    """All events since the last new start, in file order."""
    attempts: tuple[tuple[float, float], ...] = ()
    """First and last time of each attempt since the last new start, including superseded steps."""
    superseded: int = 0
    """Number of metrics lines superseded by a resumed run."""
    problems: tuple[str, ...] = ()
    """Unreadable lines, by number; a line truncated by a killed run is not listed."""


def read_metrics(path: Path) -> MetricsHistory:
    """Read a metrics file, of a finished or a running run.

    Raises:
        DataError: The file is missing or cannot be read.
    """
    try:
        text = path.read_bytes().decode(errors="replace")
    except OSError as error:
        raise DataError(f"cannot read {path}", [error.strerror or str(error)]) from error
    reading = _Reading()
    lines = text.split("\n")  # not splitlines, which also splits inside JSON strings
    unreadable: int | None = None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        record = _parse(line)
        if unreadable is not None and (record is None or record.get("event") not in _BEGINNINGS):
            reading.problem(unreadable)
        unreadable = number if record is None else None
        if record is not None:
            reading.take(record)
    if unreadable is not None and text.endswith("\n"):
        reading.problem(unreadable)  # a truncated line has no newline
    return reading.history()


def _parse(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # RecursionError: deeply nested brackets
        return None
    if not isinstance(record, dict):
        return None
    if isinstance(record.get("event"), str):
        return record
    step = record.get("step")
    return record if type(step) is int and 0 <= step < _STEPS else None


class _Reading:
    """State while reading one file from start to end."""

    def __init__(self) -> None:
        self._records: list[dict[str, Any]] = []
        self._events: list[dict[str, object]] = []
        self._attempts: list[tuple[float, float]] = []
        self._superseded = 0
        self._problems: list[str] = []

    def take(self, record: dict[str, Any]) -> None:
        event = record.get("event")
        if event == "start":
            self._keep_until(None)
            self._events.clear()
            self._attempts.clear()
        elif event == "resume" and type(record.get("step")) is int:
            self._keep_until(record["step"])
        if event is None:
            self._records.append(record)
        else:
            self._events.append(record)
        self._clock(record, begins=event in _BEGINNINGS)

    def problem(self, line: int) -> None:
        self._problems.append(f"line {line} is not a JSON object with a step or an event; left out")

    def history(self) -> MetricsHistory:
        return MetricsHistory(
            records=tuple(sorted(self._records, key=lambda record: record["step"])),
            events=tuple(self._events),
            attempts=tuple(self._attempts),
            superseded=self._superseded,
            problems=tuple(self._problems),
        )

    def _keep_until(self, step: int | None) -> None:
        kept = [r for r in self._records if step is not None and r["step"] <= step]
        self._superseded += len(self._records) - len(kept)
        self._records = kept

    def _clock(self, record: dict[str, object], *, begins: bool) -> None:
        moment = record.get("time")
        if not isinstance(moment, int | float):
            return
        if begins or not self._attempts:
            self._attempts.append((moment, moment))
        else:
            self._attempts[-1] = (self._attempts[-1][0], moment)
