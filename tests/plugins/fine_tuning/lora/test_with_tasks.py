"""Ten steps of each task with adapters against PEFT's model, in its loss by others or written out:
losses, gradient norms and every metric. ``sft`` and ``orm`` have suites of their own beside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from ascend_run.ops.preference_loss import METRICS
from ascend_run.testing.pool import GlooPool
from tests.core.train.runs import whole_run
from tests.support.plain_preferences import PlainSteps
from tests.support.preference_files import assert_equal_steps, tokenized, write_models_and_pairs
from tests.support.rated_solutions import (
    OPTIONS,
    PlainRatings,
    columns,
    write_model_and_solutions,
)
from tests.support.rated_solutions import tokenized as tokenized_solutions
from tests.support.task_runs import BATCH, STEPS, batches_of, ten_steps
from tests.support.trl_steps import TrlSteps

from .peft_models import ALPHA, RANK, peft_model, read_peft, write_peft

Steps = list[dict[str, float]]


def rated_by_peft(folder: Path, output: Path) -> Steps:
    solutions = tokenized_solutions(folder / "tokenizer", folder / "train.jsonl")
    model = read_peft(folder / "model", folder / "adapter").eval()
    plain = PlainRatings(model=model, columns=columns(folder / "tokenizer"))
    return [*plain.steps(batches_of(solutions))]


def preferred_by_peft(folder: Path, output: Path) -> Steps:
    plain = PlainSteps(
        folder=folder / "model",
        read=partial(read_peft, folder=folder / "adapter"),
        loss=lambda chosen, rejected: -torch.sigmoid(2.5 * (chosen - rejected) - 3.5).log(),
        reference_free=True,
        averages=True,
        logs_means=True,
        beta=2.5,
    )
    return [*plain.steps(batches_of(tokenized(folder / "blocks", folder / "train.jsonl")))]


def preferred_by_trl(folder: Path, output: Path) -> Steps:
    """Its reference is a copy of the adapter as it was loaded."""
    read = partial(read_peft, folder=folder / "adapter")
    return TrlSteps(models=folder, batch=BATCH, at_once=BATCH, read=read).run(output)


@attrs.frozen
class Case:
    write: Callable[[Path, int], Path]
    """Writes a model and samples of a number."""
    steps: Callable[[Path, Path], Steps]
    """Takes the steps with what is in a folder, and another to write to."""
    metrics: tuple[str, ...] = METRICS
    options: Mapping[str, Any] = attrs.field(factory=dict)


CASES = {
    "dpo": Case(
        write_models_and_pairs, preferred_by_trl, options={"plugins__dpo__reference": "base"}
    ),
    "prm": Case(write_model_and_solutions, rated_by_peft, ("accuracy",), OPTIONS),
    "simpo": Case(write_models_and_pairs, preferred_by_peft),
}


@pytest.mark.exhaustive(by=lambda task: ())
@pytest.mark.parametrize(
    "task", [pytest.param(name, marks=pytest.mark.needs_plugins(name)) for name in CASES]
)
def test_ten_steps_of_a_task_are_those_of_peft(
    gloo_pool: GlooPool, tmp_path: Path, task: str
) -> None:
    case = CASES[task]
    folder = case.write(tmp_path / "given", STEPS * BATCH)
    write_peft(peft_model(folder / "model"), folder / "adapter")
    run = ten_steps(
        task,
        folder,
        tmp_path / "run",
        plugins__lora__rank=RANK,
        plugins__lora__alpha=float(ALPHA),
        plugins__lora__load=str(folder / "adapter"),
        train__micro_batch_size=2,
        **case.options,
    )
    (ended,) = gloo_pool.run(whole_run, 1, run, ("lora",), timeout=100)
    steps = case.steps(folder, tmp_path / "theirs")
    assert_equal_steps(ended.readings, steps, case.metrics)
    assert steps[-1]["loss"] != pytest.approx(steps[0]["loss"], rel=0.01)
