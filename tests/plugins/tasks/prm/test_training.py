"""Ten steps against transformers and torch: losses, gradient norms and accuracies, in each layout.
Then gradients in float64, packing, resuming and evaluation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ascend_run.testing.hugging_face.widened import computing_in
from ascend_run.testing.pool import GlooPool
from tests.core.train.runs import assert_same, whole_run
from tests.support.folder_gradients import errors_of_gradients, write_gradients
from tests.support.needed_plugins import names_of
from tests.support.preference_files import assert_equal_steps
from tests.support.rated_solutions import (
    OPTIONS,
    PlainRatings,
    tokenized,
    write_model_and_solutions,
)
from tests.support.tiny_llama import OPTIMIZER

STEPS, BATCH = 10, 4
METRICS = ("accuracy",)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_and_solutions(tmp_path_factory.mktemp("prm"), STEPS * BATCH)


def plain_steps(models: Path, model: str = "model") -> list[dict[str, float]]:
    given = tokenized(models / "tokenizer", models / "train.jsonl")
    batches = [given[step * BATCH : (step + 1) * BATCH] for step in range(STEPS)]
    return list(PlainRatings.of(models / model, models / "tokenizer").steps(batches))


Plain = Callable[[str], list[dict[str, float]]]


@pytest.fixture(scope="module")
def plain(models: Path) -> Plain:
    """Return the steps of a model, which are run once."""
    return functools.cache(partial(plain_steps, models))


def values(models: Path, output: Path, **changes: Any) -> Mapping[str, Any]:
    return {
        **OPTIMIZER,
        **OPTIONS,
        "task": "prm",
        "run.output_dir": str(output),
        "model.family": "llama",
        "model.hf_path": str(models / "model"),
        "model.make_vocab_size_divisible_by": 8,
        "data.train": [str(models / "train.jsonl")],
        "data.validation": [str(models / "held-out.jsonl")],
        "data.tokenizer": str(models / "tokenizer"),
        "data.seq_length": 128,
        "train.train_iters": STEPS,
        "train.global_batch_size": BATCH,
        "train.precision": "fp32",
        "train.log_interval": 1,
        "plugins.prm.shuffle": False,
        "plugins.prm.packing": False,
        **{name.replace("__", "."): value for name, value in changes.items()},
    }


TP, PP = "parallel__tensor_model_parallel_size", "parallel__pipeline_model_parallel_size"
CP = "parallel__context_parallel_size"
LAYOUTS: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "one": (1, {}, ()),
    "one, all at once": (1, {"train__micro_batch_size": 4}, ()),
    "dp=2, distributed optimizer": (2, {"ddp__use_distributed_optimizer": True}, ()),
    "tp=2": (2, {TP: 2}, ()),
    "tp=2, sp": (2, {TP: 2, "parallel__sequence_parallel": True, "train__micro_batch_size": 2}, ()),
    "pp=2, vpp=2": (
        2,
        {PP: 2, "parallel__virtual_pipeline_model_parallel_size": 2, "model__hf_path": "deep"},
        (),
    ),
    "cp=2, ulysses": (2, {CP: 2}, ("ulysses",)),
    "cp=2, ring": (2, {CP: 2, "train__micro_batch_size": 2}, ("ring-attention",)),
}


@pytest.mark.exhaustive(by=lambda layout: [LAYOUTS[layout][0] > 1])
@pytest.mark.parametrize("layout", names_of(LAYOUTS, lambda case: case[2]))
def test_ten_steps_are_those_of_transformers(
    gloo_pool: GlooPool, models: Path, plain: Plain, tmp_path: Path, layout: str
) -> None:
    """A mean over all steps of the batch: solutions have one to four."""
    ranks, changes, plugins = LAYOUTS[layout]
    model = changes.get("model__hf_path", "model")
    run = values(models, tmp_path / "run", **{**changes, "model__hf_path": str(models / model)})
    ended = gloo_pool.run(whole_run, ranks, run, plugins, timeout=100)
    assert_equal_steps(ended[0].readings, plain(model), METRICS)


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

    straight = run("straight", train__train_iters=13)
    run("halves", train__train_iters=9, checkpoint__save_interval=9)
    halves = run("halves", train__train_iters=13, checkpoint__save_interval=9)
    assert_same(halves, straight)
    assert halves[0].readings == straight[0].readings
