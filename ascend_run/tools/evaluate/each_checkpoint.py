"""Evaluate the checkpoints of a run one after the other, also while it trains.

It is another process than the run, so that it neither stops nor breaks it, and can be started later
or with other tasks. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import attrs

from ascend_run.core.checkpoint.folders import published
from ascend_run.core.log.append import AppendedLines
from ascend_run.core.log.json_values import to_json
from ascend_run.core.log.metrics import read_metrics
from ascend_run.core.run_files import CONFIG_NAME
from ascend_run.plugin_api import AscendRunError, ConfigError
from ascend_run.tools.pages.evaluations_file import FILE_NAME, read_evaluations

from .evaluating import Evaluation, evaluated
from .progress import Progress
from .results import Results
from .storing import write_results

_FOLDER: Final = "evaluations"
_SECONDS: Final = 5.0
"""Between two looks for new checkpoints."""
_ENDS: Final = ("finish", "failure")


@attrs.frozen(kw_only=True)
class EachCheckpoint:
    """Which checkpoints of a run are evaluated."""

    every: int = 1  #: Those whose step is a multiple of it. Unit: steps.
    follow: bool = False  #: Wait for new ones until the run ends.
    name: str = ""  #: Of the evaluation, where a run has several.


@attrs.frozen(kw_only=True)
class Evaluated:
    """One of them."""

    step: int
    results: Results | None
    """None: the run removed it before it was evaluated."""


def evaluate_each(
    asked: Evaluation,
    each: EachCheckpoint,
    progress: Progress,
    wait: Callable[[float], None] = time.sleep,
) -> Iterator[Evaluated]:
    """Evaluate the checkpoints of a run that have no scores of this evaluation yet, oldest first.

    Scores are added to the run folder, from which its report draws them.

    Args:
        asked: ``model`` is the folder of the run.
        wait: Called between two looks for new checkpoints.

    Raises:
        AscendRunError: The folder is not that of a run, has scores of other options under this
            name, or a checkpoint cannot be evaluated.
    """
    run = asked.model
    asked = attrs.evolve(asked, options=attrs.evolve(asked.options, config=_config(run)))
    folder, record = _checkpoints(run), _record(asked)
    _require_same(run, each.name, record)
    lost: set[int] = set()
    while True:
        ends = not each.follow or _has_ended(run)
        for step, path in published(str(folder)).items():
            if step % each.every or step in lost:
                continue
            digest = _digest(Path(path))
            if digest is None or (step, digest) in _done(run, each.name):
                continue
            results = _evaluated(asked, folder, step, Path(path), progress)
            if results is None:
                lost.add(step)
            else:
                _store(run, each.name, step, digest, record, results)
            yield Evaluated(step=step, results=results)
        if ends:
            return
        wait(_SECONDS)


def scores(results: Results) -> dict[str, float]:
    """Return what the report draws: score -> value."""
    found = {}
    for one in results.perplexities:
        found[f"{one.name} loss"] = one.loss
        found[f"{one.name} perplexity"] = one.perplexity
    found |= {f"{one.task} accuracy": one.total.accuracy for one in results.tasks}
    return found | {f"{one.task} {one.shown}": one.value for one in results.harness}


def _evaluated(
    asked: Evaluation, folder: Path, step: int, path: Path, progress: Progress
) -> Results | None:
    """Return the results; None if the checkpoint is gone, as ``checkpoint.keep_last`` says."""
    options = attrs.evolve(asked.options, step=step)
    try:
        return evaluated(attrs.evolve(asked, model=folder, options=options), progress)
    except AscendRunError:
        if path.exists():
            raise
        return None


def _store(
    run: Path,
    name: str,
    step: int,
    digest: str,
    record: Mapping[str, object],
    results: Results,
) -> None:
    """Write the answers to a folder of their own, then the line with the scores."""
    parent = run / _FOLDER / (name or "default")
    parent.mkdir(parents=True, exist_ok=True)
    answers = parent / f"step_{step:08d}"
    if answers.exists():  # of an earlier attempt of the run
        shutil.rmtree(answers)
    write_results(results, answers, written=time.time())
    line = {
        "step": step,
        "name": name,
        "asked": record,
        "checkpoint": digest,
        "values": scores(results),
        "time": round(time.time(), 3),
    }
    with AppendedLines(run / FILE_NAME) as lines:
        lines.end_torn_line()
        lines.append(to_json(line))


def _done(run: Path, name: str) -> set[tuple[int, str]]:
    return {(one.step, one.checkpoint) for one in read_evaluations(run) if one.name == name}


def _require_same(run: Path, name: str, record: Mapping[str, object]) -> None:
    if any(one.asked != record for one in read_evaluations(run) if one.name == name):
        under = f"under the name {name!r}" if name else "without a name"
        raise ConfigError(
            f"{run / FILE_NAME} has scores of other data or options {under}; name these with --name"
        )


def _record(asked: Evaluation) -> dict[str, object]:
    """Return the options as they are read from a line."""
    values = attrs.asdict(asked)
    for name in ("model", "options"):
        del values[name]
    stored = attrs.asdict(attrs.evolve(asked.options, config=None, step=None))
    record: dict[str, object] = json.loads(to_json({**values, "options": stored}))
    return record


def _config(run: Path) -> Path:
    config = run / CONFIG_NAME
    if not config.is_file():
        raise ConfigError(
            f"{run} is no folder of a run: it has no {CONFIG_NAME}; name the run.output_dir of one"
        )
    return config


def _checkpoints(run: Path) -> Path:
    from ascend_run.prepare.config.reading import read_raw

    given = read_raw(run / CONFIG_NAME).values.get("checkpoint.save")
    stated = None if given is None else given.value
    return run / "checkpoints" if stated is None else Path(str(stated))


def _has_ended(run: Path) -> bool:
    file = run / "metrics.jsonl"
    events = read_metrics(file).events if file.exists() else ()
    return bool(events) and events[-1]["event"] in _ENDS


def _digest(checkpoint: Path) -> str | None:
    """Return the hash of a checkpoint's manifest; None if the checkpoint is gone."""
    try:
        return hashlib.sha256((checkpoint / "manifest.json").read_bytes()).hexdigest()
    except OSError:
        return None
