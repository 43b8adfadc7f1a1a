"""Read ``fingerprint.jsonl``, without what resumed runs have superseded. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from ascend_run.core.fingerprint.record import FILE_NAME, FORMAT
from ascend_run.core.log.json_values import number
from ascend_run.core.log.metrics import read_metrics
from ascend_run.plugin_api.errors import DataError

_HASH: Final = re.compile(r"[0-9a-f]{16}")


@attrs.frozen(kw_only=True)
class Entry:
    """Fingerprint of one step."""

    step: int
    fingerprint: str
    """Hash of the loss, the gradient norm and the parameters; 16 hex digits."""
    loss: float | None
    """None before the first step. ``grad_norm`` is also None for a skipped step."""
    grad_norm: float | None
    parameters: str | None
    """Hash of the sampled elements after the update; 16 hex digits.

    None if the model cannot tell which shard a rank holds.
    """
    consumed_samples: int
    batch: str | None = None
    """Hash of the rows that the step read, in order; 16 hex digits.

    None before the first step, and in files of earlier versions.
    """


@attrs.frozen(kw_only=True)
class Fingerprints:
    """Content of the file for the run's current history."""

    entries: Mapping[int, Entry]
    """Maps each step to its entry, in step order."""
    superseded: int
    """Number of entries superseded by a resumed run."""
    problems: tuple[str, ...]


def read_fingerprints(folder: Path) -> Fingerprints:
    """Read the file of a run folder, of a finished or a running run.

    Raises:
        DataError: The file is missing, has no readable entry, or has another format.
    """
    path = folder / FILE_NAME
    if not path.exists():
        raise DataError(
            f"{folder} holds no {FILE_NAME}",
            ["its run was of a version that wrote none, or has not begun to train"],
        )
    history = read_metrics(path)
    formats = {event.get("format") for event in history.events if "format" in event}
    if other := sorted(str(form) for form in formats - {FORMAT}):
        raise DataError(
            f"{path} has format {', '.join(other)}, and this version reads format {FORMAT}",
            ["compare the runs with the version of ascend-run that made them"],
        )
    entries: dict[int, Entry] = {}
    problems = list(history.problems)
    for record in history.records:
        try:
            entries[record["step"]] = _entry(record)
        except (KeyError, TypeError, ValueError):
            problems.append(f"the line of step {record['step']} is not a fingerprint; left out")
    if problems and not entries:
        raise DataError(f"{path} holds no fingerprint that can be read", problems)
    return Fingerprints(entries=entries, superseded=history.superseded, problems=tuple(problems))


def _entry(record: Mapping[str, Any]) -> Entry:
    """Parse one line.

    Raises:
        KeyError, TypeError, ValueError: The line is not an entry.
    """
    parameters, batch = record["parameters"], record.get("batch")
    return Entry(
        step=record["step"],
        fingerprint=_hash(record["fingerprint"]),
        loss=_number(record["loss"]),
        grad_norm=_number(record["grad_norm"]),
        parameters=None if parameters is None else _hash(parameters),
        consumed_samples=_count(record["consumed_samples"]),
        batch=None if batch is None else _hash(batch),
    )


def _hash(value: Any) -> str:
    if not _HASH.fullmatch(value):
        raise ValueError(value)
    return str(value)


def _count(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(value)
    return value


def _number(value: object) -> float | None:
    if value is None:
        return None
    found = number(value)
    if found is None:
        raise ValueError(value)
    return found
