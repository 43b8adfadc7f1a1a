"""Ten steps against transformers and torch: losses, gradient norms and every metric."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_run.testing.pool import GlooPool
from tests.core.train.runs import whole_run
from tests.support.needed_plugins import names_of
from tests.support.plain_preferences import PlainSteps
from tests.support.preference_files import assert_equal_steps, tokenized, write_models_and_pairs
from tests.support.task_runs import BATCH, LAYOUTS, STEPS, Layout, batches_of, ten_steps


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models_and_pairs(tmp_path_factory.mktemp("simpo"), STEPS * BATCH)


def plain_steps(
    models: Path, loss: Callable[[Tensor, Tensor], Tensor], **options: Any
) -> list[dict[str, float]]:
    pairs = tokenized(models / "blocks", models / "train.jsonl")
    steps = PlainSteps(
        folder=models / "model",
        loss=loss,
        reference_free=True,
        averages=True,
        logs_means=True,
        **{"beta": 2.5, **options},
    )
    return list(steps.steps(batches_of(pairs)))


values = partial(ten_steps, "simpo", train__eval_interval=0)


def sigmoid(chosen: Tensor, rejected: Tensor) -> Tensor:
    return -torch.sigmoid(2.5 * (chosen - rejected) - 3.5).log()


VARIANTS: dict[str, tuple[dict[str, Any], Callable[[Tensor, Tensor], Tensor], dict[str, Any]]] = {
    "sigmoid": ({}, sigmoid, {}),
    "smoothing": (
        {"label_smoothing": 0.1},
        lambda c, r: 0.9 * sigmoid(c, r) - 0.1 * torch.sigmoid(3.5 - 2.5 * (c - r)).log(),
        {},
    ),
    "hinge": (
        {"loss": "hinge", "beta": 2.0, "gamma_beta_ratio": 0.5},
        lambda c, r: (1 - 2.0 * (c - r - 0.5)).clamp(min=0),
        {"beta": 2.0},
    ),
    "ipo": (
        {"loss": "ipo", "beta": 1.0, "gamma_beta_ratio": 0.5},
        lambda c, r: (c - r - 1.0) ** 2,
        {"beta": 1.0},
    ),
    "sft_weight": ({"sft_weight": 0.5}, sigmoid, {"sft_weight": 0.5}),
}


@pytest.mark.exhaustive(by=lambda variant: [variant == "sft_weight"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_is_that_of_transformers(
    gloo_pool: GlooPool, models: Path, tmp_path: Path, variant: str
) -> None:
    ours, loss, theirs = VARIANTS[variant]
    options = {f"plugins__simpo__{name}": value for name, value in ours.items()}
    run = values(models, tmp_path / "run", train__micro_batch_size=2, **options)
    (ended,) = gloo_pool.run(whole_run, 1, run, timeout=100)
    assert_equal_steps(ended.readings, plain_steps(models, loss, **theirs))


CASES: dict[str, Layout] = {
    "longer padding": (1, {"data__seq_length": 256}, ()),
    **{name: LAYOUTS[name] for name in ("dp=2", "tp=2, sp", "pp=2")},
    "cp=2": LAYOUTS["cp=2, ulysses"],
}


@pytest.mark.exhaustive(by=lambda layout: [CASES[layout][0] > 1, bool(CASES[layout][2])])
@pytest.mark.parametrize("layout", names_of(CASES, lambda case: case[2]))
def test_ten_steps_are_the_same_in_each_layout(
    gloo_pool: GlooPool, models: Path, tmp_path: Path, layout: str
) -> None:
    ranks, changes, plugins = CASES[layout]
    run = values(models, tmp_path / "run", **changes)
    ended = gloo_pool.run(whole_run, ranks, run, plugins, timeout=100)
    assert_equal_steps(ended[0].readings, plain_steps(models, sigmoid))
