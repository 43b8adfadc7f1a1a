"""``fingerprint.jsonl``: a line for every optimizer step, across any number of resumptions.

Written and superseded as ``metrics.jsonl`` is: a ``start`` or ``resume`` event begins an attempt,
and what an earlier attempt wrote of later steps no longer counts. Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from ascend_run.core.log.json_values import number
from ascend_run.core.log.metrics import MetricsWriter, read_metrics
from ascend_run.plugin_api.errors import DataError

FILE_NAME: Final = "fingerprint.jsonl"
FORMAT: Final = 1
"""Raised where what is hashed, or how, changes: hashes of two formats cannot be compared."""

_HASH: Final = re.compile(r"[0-9a-f]{16}")


@attrs.frozen(kw_only=True)
class Entry:
    """What one step came to."""

    step: int
    fingerprint: str
    """Of the three parts below; 16 hex digits."""
    loss: float | None
    """None before the first step, as for ``grad_norm``; the latter of a skipped step too."""
    grad_norm: float | None
    parameters: str | None
    """Of the sampled elements after the update; 16 hex digits. None where the model does not say
    which part of it a rank holds."""
    consumed_samples: int
    batch: str | None = None
    """Of the rows that the step read and their order; 16 hex digits. None before the first step,
    and in files of earlier versions."""


@attrs.frozen(kw_only=True)
class Fingerprints:
    """What the file says of a run as it now stands."""

    entries: Mapping[int, Entry]
    """Step -> entry, in the order of the steps."""
    superseded: int
    """Entries of steps that a resumed run has taken again."""
    problems: tuple[str, ...]


def writer(folder: Path, start: int) -> MetricsWriter:
    """Begin another attempt in the file of a run folder.

    Args:
        start: Steps done before, by the checkpoint that the run goes on from.

    Raises:
        StorageError: The file system refused.
    """
    return MetricsWriter(folder / FILE_NAME, start or None, about={"format": FORMAT})


def read_fingerprints(folder: Path) -> Fingerprints:
    """Read the file of a run folder, finished or still growing.

    Raises:
        DataError: It is missing, holds nothing that can be read, or has another format.
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
    """
    Raises:
        KeyError, TypeError, ValueError: It is none.
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


def _number(value: Any) -> float | None:
    if value is None:
        return None
    found = number(value)
    if found is None:
        raise ValueError(value)
    return found
