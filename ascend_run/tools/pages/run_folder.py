"""Read a run folder, which may be incomplete."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs

from ascend_run.core.fingerprint.record import FILE_NAME
from ascend_run.core.log.metrics import MetricsHistory, read_metrics
from ascend_run.plugin_api.errors import DataError
from ascend_run.prepare.plan.records import Plan
from ascend_run.text.dataset_log import DATASET_READ

from .config_rows import ConfigRow, config_rows
from .evaluations_file import read_evaluations, scores_by_step
from .fingerprint_file import Entry, read_fingerprints
from .record_reading import read_plan, read_record, read_table
from .run_records import (
    DatasetSize,
    LockedPlugin,
    LogEvent,
    RecordedConfig,
    RecordedEnvironment,
    RunEvent,
)
from .step_metrics import StepMetrics

SIGNS_OF_A_RUN: Final = ("config.toml", "plan.json", "metrics.jsonl")
_LOG_KEYS: Final = frozenset(field.name for field in attrs.fields(LogEvent)) - {"fields"}
_SHOWN_LEVELS: Final = frozenset({"warning", "error", "critical"})


@attrs.frozen(kw_only=True)
class RunData:
    """The contents of a run folder; parts that are missing or corrupt are empty."""

    name: str
    path: Path
    config: RecordedConfig = attrs.field(factory=RecordedConfig)
    config_rows: tuple[ConfigRow, ...] = ()
    plan: Plan = attrs.field(factory=lambda: read_plan({}))
    lock: Mapping[str, LockedPlugin] = attrs.field(factory=dict)
    """Plugin -> its exact code."""
    environment: RecordedEnvironment = attrs.field(factory=RecordedEnvironment)
    metrics: MetricsHistory = attrs.field(factory=MetricsHistory)
    steps: tuple[StepMetrics, ...] = ()
    """Its metrics, in step order."""
    evaluations: tuple[StepMetrics, ...] = ()
    """Scores of its checkpoints by ``ascend-run evaluate``, in step order."""
    events: tuple[RunEvent, ...] = ()
    """Of the metrics, in file order."""
    fingerprint: Entry | None = None
    """Fingerprint of the last step; None if there is none."""
    warnings: tuple[LogEvent, ...] = ()
    """Log events of level warning or higher."""
    datasets: tuple[DatasetSize, ...] = ()
    """What each attempt read, in the order of the log."""
    problems: tuple[str, ...] = ()
    """Messages about missing and unreadable parts."""


def read_run(path: Path) -> RunData:
    """Read the run folder of a finished, failed or running run.

    Raises:
        DataError: The folder does not exist or is not a run folder.
    """
    if not path.is_dir():
        raise DataError(f"no run folder {path}", ["name the folder that run.output_dir named"])
    if not any((path / name).is_file() for name in SIGNS_OF_A_RUN):
        problem = f"it holds none of {', '.join(SIGNS_OF_A_RUN)}"
        raise DataError(f"{path} is not the folder of a run", [problem])
    problems: list[str] = []
    plan = read_plan(_json_object(path / "plan.json", problems))
    text = _text(path / "config.toml", problems)
    config = _toml(text, problems)
    metrics = _metrics(path / "metrics.jsonl", problems)
    log = [*_log(path / "log.jsonl", problems)]
    return RunData(
        name=path.resolve().name,
        path=path,
        config=read_record(config, RecordedConfig),
        config_rows=config_rows(config, text, plan.origins),
        plan=plan,
        lock=read_table(_json_object(path / "plugins.lock.json", problems), LockedPlugin),
        environment=_environment(path / "environment.json"),
        metrics=metrics,
        steps=tuple(map(StepMetrics.of_line, metrics.records)),
        evaluations=scores_by_step(read_evaluations(path)),
        events=tuple(read_record(event, RunEvent) for event in metrics.events),
        fingerprint=_last_fingerprint(path, problems),
        warnings=_warnings(log),
        datasets=tuple(
            read_record(event, DatasetSize) for event in log if event.get("event") == DATASET_READ
        ),
        problems=tuple(problems),
    )


def _text(path: Path, problems: list[str]) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        problems.append(f"{path.name} is missing")
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror or error}")
    return ""


def _json_object(path: Path, problems: list[str]) -> Mapping[str, object]:
    text = _text(path, problems)
    if not text:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        problems.append(f"{path.name} is not valid JSON: {error}")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path.name} holds no JSON object")
        return {}
    return value


def _environment(path: Path) -> RecordedEnvironment:
    return read_record(_json_object(path, []), RecordedEnvironment)


def _toml(text: str, problems: list[str]) -> Mapping[str, object]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        problems.append(f"config.toml is not valid TOML: {error}")
        return {}


def _metrics(path: Path, problems: list[str]) -> MetricsHistory:
    if not path.exists():
        problems.append(f"{path.name} is missing")
        return MetricsHistory()
    try:
        history = read_metrics(path)
    except DataError as error:
        problems.append(str(error))
        return MetricsHistory()
    problems.extend(f"{path.name}: {problem}" for problem in history.problems)
    return history


def _last_fingerprint(folder: Path, problems: list[str]) -> Entry | None:
    if not (folder / FILE_NAME).exists():
        return None  # a run of an earlier version, or one without steps yet
    try:
        found = read_fingerprints(folder)
    except DataError as error:
        problems.append(str(error))
        return None
    problems.extend(f"{FILE_NAME}: {problem}" for problem in found.problems)
    return found.entries[max(found.entries)] if found.entries else None


def _log(path: Path, problems: list[str]) -> Iterator[Mapping[str, object]]:
    for line in _text(path, problems).split("\n"):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue  # truncated by a killed rank; log lines are independent
        if isinstance(event, dict):
            yield event


def _warnings(log: Sequence[Mapping[str, object]]) -> tuple[LogEvent, ...]:
    events: list[LogEvent] = []
    for event in log:
        if event.get("level") in _SHOWN_LEVELS:
            fields = {key: value for key, value in event.items() if key not in _LOG_KEYS}
            events.append(read_record({**event, "fields": fields}, LogEvent))
    return tuple(events)
