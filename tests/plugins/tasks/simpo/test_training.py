"""Ten steps against transformers and torch: losses, gradient norms and every metric."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from tests.support.tiny_llama import OPTIMIZER

STEPS, BATCH = 10, 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models_and_pairs(tmp_path_factory.mktemp("simpo"), STEPS * BATCH)


def plain_steps(
    models: Path, loss: Callable[[Tensor, Tensor], Tensor], **options: Any
) -> list[dict[str, float]]:
    pairs = tokenized(models / "blocks", models / "train.jsonl")
    batches = [pairs[step * BATCH : (step + 1) * BATCH] for step in range(STEPS)]
    steps = PlainSteps(
        folder=models / "model",
        loss=loss,
        reference_free=True,
        averages=True,
        logs_means=True,
        **{"beta": 2.5, **options},
    )
    return list(steps.steps(batches))


def values(models: Path, output: Path, **changes: Any) -> Mapping[str, Any]:
    return {
        **OPTIMIZER,
        "task": "simpo",
        "run.output_dir": str(output),
        "model.family": "llama",
        "model.hf_path": str(models / "model"),
        "model.make_vocab_size_divisible_by": 8,
        "data.train": [str(models / "train.jsonl")],
        "data.tokenizer": str(models / "tokenizer"),
        "data.seq_length": 128,
        "train.train_iters": STEPS,
        "train.global_batch_size": BATCH,
        "train.eval_interval": 0,
        "train.precision": "fp32",
        "train.log_interval": 1,
        "plugins.simpo.shuffle": False,
        "plugins.simpo.packing": False,
        **{name.replace("__", "."): value for name, value in changes.items()},
    }


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


LAYOUTS: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "longer padding": (1, {"data__seq_length": 256}, ()),
    "dp=2": (2, {"train__micro_batch_size": 2}, ()),
    "tp=2, sp": (
        2,
        {
            "parallel__tensor_model_parallel_size": 2,
            "parallel__sequence_parallel": True,
            "train__micro_batch_size": 2,
        },
        (),
    ),
    "pp=2": (2, {"parallel__pipeline_model_parallel_size": 2}, ()),
    "cp=2": (2, {"parallel__context_parallel_size": 2}, ("ulysses",)),
}


@pytest.mark.exhaustive(by=lambda layout: [LAYOUTS[layout][0] > 1, bool(LAYOUTS[layout][2])])
@pytest.mark.parametrize("layout", names_of(LAYOUTS, lambda case: case[2]))
def test_ten_steps_are_the_same_in_each_layout(
    gloo_pool: GlooPool, models: Path, tmp_path: Path, layout: str
) -> None:
    ranks, changes, plugins = LAYOUTS[layout]
    run = values(models, tmp_path / "run", **changes)
    ended = gloo_pool.run(whole_run, ranks, run, plugins, timeout=100)
    assert_equal_steps(ended[0].readings, plain_steps(models, sigmoid))
