"""Run tasks of lm-evaluation-harness. Imports no torch until it runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from ascend_run.plugin_api import ConfigError, DataError
from ascend_run.tools.evaluate.results import HarnessScore

if TYPE_CHECKING:
    from .requests import HarnessModel


@attrs.frozen(kw_only=True)
class HarnessOptions:
    """What a user asks for."""

    tasks: tuple[str, ...]
    folder: Path | None = None
    """With files of tasks; None: those of lm-evaluation-harness."""
    num_examples: int | None = None
    """Before each question; None: the task's."""
    limit: int | None = None
    """Questions of each task; None: all."""
    chat: bool = False
    """Whether they are asked by the model's chat template."""


def loaded_harness(options: HarnessOptions) -> Any:
    """Return the task manager of lm-evaluation-harness, which has read the tasks and their data.

    Raises:
        ConfigError: The package or a task is missing.
        DataError: Data of a task cannot be read.
    """
    # Data that is not on this machine is missing: nothing is downloaded.
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        os.environ.setdefault(name, "1")
    if options.folder is not None and not options.folder.is_dir():
        raise ConfigError(f"--lm-eval-tasks: there is no folder {options.folder}")
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(
            f"--lm-eval needs the package lm-eval, which cannot be imported ({error}); install it "
            "with pip install lm-eval"
        ) from None
    folder = None if options.folder is None else str(options.folder)
    manager = TaskManager(include_path=folder, include_defaults=folder is None)
    if unknown := [name for name in options.tasks if name not in manager.all_tasks]:
        where = (
            f"in {folder}" if folder else "in lm-eval; name the folder of yours: --lm-eval-tasks"
        )
        raise ConfigError(
            f"--lm-eval: there is no task {', '.join(unknown)} {where}", _some(manager.all_tasks)
        )
    try:
        manager.load([*options.tasks])
    except Exception as error:  # of datasets, jinja and the functions of a task
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError("these tasks of lm-eval cannot be read", [lines[0]]) from None
    return manager


def _some(names: Sequence[str]) -> list[str]:
    """Return the first names, if they are few."""
    return [f"there is {name}" for name in sorted(names)] if len(names) <= 20 else []


def harness_scores(
    manager: Any, harness: HarnessModel, options: HarnessOptions
) -> tuple[HarnessScore, ...]:
    """Evaluate tasks, and return each of their metrics."""
    from lm_eval import simple_evaluate

    from .adapter import lm_of

    found: Mapping[str, Any] = simple_evaluate(
        model=lm_of(harness),
        tasks=[*options.tasks],
        num_fewshot=options.num_examples,
        limit=options.limit,
        task_manager=manager,
        log_samples=False,
        apply_chat_template=options.chat,
    )
    return tuple(scores_of(found))


def scores_of(found: Mapping[str, Any]) -> list[HarnessScore]:
    """Return the metrics of what ``simple_evaluate`` returns."""
    scores = []
    for task, values in found["results"].items():
        for key, value in values.items():
            metric, comma, name = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{metric}_stderr,{name}")
            scores.append(
                HarnessScore(
                    task=task,
                    metric=metric,
                    filter=name,
                    value=float(value),
                    error=float(error) if isinstance(error, int | float) else None,
                    shots=found.get("n-shot", {}).get(task),
                    questions=found.get("n-samples", {}).get(task, {}).get("effective"),
                )
            )
    return scores
