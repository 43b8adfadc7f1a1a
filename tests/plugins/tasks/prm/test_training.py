"""Ten steps against transformers and torch: losses, gradient norms and accuracies, in each layout.
Then gradients in float64 and resuming."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ascend_run.testing.hugging_face.widened import computing_in
from ascend_run.testing.pool import GlooPool
from tests.core.train.runs import assert_the_same_in_two_halves, whole_run
from tests.support.folder_gradients import errors_of_gradients, write_gradients
from tests.support.needed_plugins import names_of
from tests.support.preference_files import assert_equal_steps
from tests.support.rated_solutions import (
    OPTIONS,
    PlainRatings,
    tokenized,
    write_model_and_solutions,
)
from tests.support.task_runs import BATCH, STEPS, batches_of, layouts_without, ten_steps

METRICS = ("accuracy",)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_and_solutions(tmp_path_factory.mktemp("prm"), STEPS * BATCH)


def plain_steps(models: Path, model: str = "model") -> list[dict[str, float]]:
    given = tokenized(models / "tokenizer", models / "train.jsonl")
    return list(PlainRatings.of(models / model, models / "tokenizer").steps(batches_of(given)))


Plain = Callable[[str], list[dict[str, float]]]


@pytest.fixture(scope="module")
def plain(models: Path) -> Plain:
    """Return the steps of a model, which are run once."""
    return functools.cache(partial(plain_steps, models))


values = partial(ten_steps, "prm", **OPTIONS)
LAYOUTS = layouts_without("dp=2", "pp=2", "pp=2, two rows", "pp=2, tied", "tp=2, pp=2, sp")


@pytest.mark.exhaustive(by=lambda layout: [LAYOUTS[layout][0] > 1])
@pytest.mark.parametrize("layout", names_of(LAYOUTS, lambda case: case[2]))
def test_ten_steps_are_those_of_transformers(
    gloo_pool: GlooPool, models: Path, plain: Plain, tmp_path: Path, layout: str
) -> None:
    """A mean over all steps of the batch: solutions have one to four."""
    ranks, changes, plugins = LAYOUTS[layout]
    run = values(models, tmp_path / "run", **changes)
    ended = gloo_pool.run(whole_run, ranks, run, plugins, timeout=100)
    assert_equal_steps(ended[0].readings, plain(changes.get("model", "model")), METRICS)


@pytest.mark.parametrize("packing", [False, True])
def test_each_gradient_is_that_of_transformers(
    gloo_pool: GlooPool, models: Path, tmp_path: Path, packing: bool
) -> None:
    given = tokenized(models / "tokenizer", models / "held-out.jsonl")
    with computing_in(torch.float64):
        plain = PlainRatings.of(models / "model", models / "tokenizer")
        plain.model.double()
        plain.backward(given)
    write_gradients(plain.model, tmp_path / "gradients")
    run = values(
        models,
        tmp_path / "run",
        data__train=[str(models / "held-out.jsonl")],
        train__global_batch_size=1 if packing else len(given),
        plugins__prm__packing=packing,
        data__seq_length=512,
        model__max_position_embeddings=512,
    )
    (errors,) = gloo_pool.run(errors_of_gradients, 1, run, str(tmp_path / "gradients"), timeout=100)
    assert max(errors.values()) < 1e-10, errors


def test_a_run_in_two_halves_is_the_run_in_one(
    gloo_pool: GlooPool, models: Path, tmp_path: Path
) -> None:
    def run(name: str, **changes: Any) -> Any:
        options = values(models, tmp_path / name, plugins__prm__shuffle=True, **changes)
        return gloo_pool.run(whole_run, 2, options, timeout=100)

    assert_the_same_in_two_halves(run, 13, 9)
