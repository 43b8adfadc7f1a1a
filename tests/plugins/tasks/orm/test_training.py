"""Ten steps against transformers and torch: losses, gradient norms and every metric, in each
variant and layout. Then resuming, packing and evaluation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ascend_run.ops.preference_loss import REWARDS
from ascend_run.testing.pool import GlooPool
from tests.core.train.runs import assert_same, whole_run
from tests.support.needed_plugins import names_of
from tests.support.plain_rewards import PlainRewards, scorer, write_scorer
from tests.support.preference_files import assert_equal_steps, tokenized, write_models_and_pairs
from tests.support.tiny_llama import OPTIMIZER, write_llama

STEPS, BATCH = 10, 4
PACKS = 3
"""Samples that the held-out pairs fill: two, three and two of them."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_models_and_pairs(tmp_path_factory.mktemp("orm"), STEPS * BATCH)
    tied = {"tie_word_embeddings": True, "max_position_embeddings": 256}
    write_llama(folder / "tied", **tied)
    for name in ("model", "deep", "tied"):
        write_scorer(folder / f"{name}-scorer", folder / name)
    return folder


def plain_steps(
    models: Path, model: str = "model-scorer", **options: Any
) -> list[dict[str, float]]:
    pairs = tokenized(models / "blocks", models / "train.jsonl")
    batches = [pairs[step * BATCH : (step + 1) * BATCH] for step in range(STEPS)]
    return list(PlainRewards(model=scorer(models / model), **options).steps(batches))


Plain = Callable[[str], list[dict[str, float]]]


@pytest.fixture(scope="module")
def plain(models: Path) -> Plain:
    """Return the steps of a model, which are run once."""
    return functools.cache(partial(plain_steps, models))


def values(models: Path, output: Path, **changes: Any) -> Mapping[str, Any]:
    return {
        **OPTIMIZER,
        "task": "orm",
        "run.output_dir": str(output),
        "model.family": "llama",
        "model.hf_path": str(models / "model-scorer"),
        "model.make_vocab_size_divisible_by": 8,
        "data.train": [str(models / "train.jsonl")],
        "data.validation": [str(models / "held-out.jsonl")],
        "data.tokenizer": str(models / "tokenizer"),
        "data.seq_length": 128,
        "train.train_iters": STEPS,
        "train.global_batch_size": BATCH,
        "train.precision": "fp32",
        "train.log_interval": 1,
        "plugins.orm.shuffle": False,
        "plugins.orm.packing": False,
        **{name.replace("__", "."): value for name, value in changes.items()},
    }


TP, PP = "parallel__tensor_model_parallel_size", "parallel__pipeline_model_parallel_size"
CP = "parallel__context_parallel_size"
LAYOUTS: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "one": (1, {}, ()),
    "one, all at once": (1, {"train__micro_batch_size": 4}, ()),
    "dp=2": (2, {"train__micro_batch_size": 2}, ()),
    "dp=2, distributed optimizer": (2, {"ddp__use_distributed_optimizer": True}, ()),
    "tp=2": (2, {TP: 2}, ()),
    "tp=2, sp": (2, {TP: 2, "parallel__sequence_parallel": True, "train__micro_batch_size": 2}, ()),
    "pp=2": (2, {PP: 2}, ()),
    "pp=2, tied": (2, {PP: 2, "model__hf_path": "tied-scorer"}, ()),
    "pp=2, vpp=2": (
        2,
        {
            PP: 2,
            "parallel__virtual_pipeline_model_parallel_size": 2,
            "model__hf_path": "deep-scorer",
        },
        (),
    ),
    "tp=2, pp=2, sp": (4, {TP: 2, PP: 2, "parallel__sequence_parallel": True}, ()),
    "cp=2, ulysses": (2, {CP: 2}, ("ulysses",)),
    "cp=2, ring": (2, {CP: 2, "train__micro_batch_size": 2}, ("ring-attention",)),
}


@pytest.mark.exhaustive(by=lambda layout: [LAYOUTS[layout][0] > 1, bool(LAYOUTS[layout][2])])
@pytest.mark.parametrize("layout", names_of(LAYOUTS, lambda case: case[2]))
def test_ten_steps_are_those_of_transformers(
    gloo_pool: GlooPool, models: Path, plain: Plain, tmp_path: Path, layout: str
) -> None:
    ranks, changes, plugins = LAYOUTS[layout]
    model = changes.get("model__hf_path", "model-scorer")
    run = values(models, tmp_path / "run", **{**changes, "model__hf_path": str(models / model)})
    ended = gloo_pool.run(whole_run, ranks, run, plugins, timeout=100)
    assert_equal_steps(ended[0].readings, plain(model), REWARDS)
    assert plain(model)[-1]["loss"] < 0.8 * plain(model)[0]["loss"]


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "margin": ({"margin": 0.5}, {"margin": 0.5}),
    "centering": ({"center_rewards_coefficient": 0.1}, {"centering": 0.1}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_is_that_of_transformers(
    gloo_pool: GlooPool, models: Path, tmp_path: Path, variant: str
) -> None:
    ours, theirs = VARIANTS[variant]
    options = {f"plugins__orm__{name}": value for name, value in ours.items()}
    run = values(models, tmp_path / "run", train__micro_batch_size=2, **options)
    (ended,) = gloo_pool.run(whole_run, 1, run, timeout=100)
    assert_equal_steps(ended.readings, plain_steps(models, **theirs), REWARDS)


@pytest.mark.parametrize("packing", [False, True])
def test_packed_pairs_cost_what_they_cost_alone(
    gloo_pool: GlooPool, models: Path, tmp_path: Path, packing: bool
) -> None:
    """The seven held-out pairs in one step; packed, they fill samples of unequal numbers."""
    run = values(
        models,
        tmp_path / "run",
        data__train=[str(models / "held-out.jsonl")],
        train__train_iters=1,
        train__global_batch_size=PACKS if packing else 7,
        train__micro_batch_size=PACKS if packing else 1,
        plugins__orm__packing=packing,
    )
    (ended,) = gloo_pool.run(whole_run, 1, run, timeout=100)
    pairs = tokenized(models / "blocks", models / "held-out.jsonl")
    plain = [*PlainRewards(model=scorer(models / "model-scorer")).steps([pairs])]
    assert_equal_steps(ended.readings, plain, REWARDS)


def test_a_run_in_two_halves_is_the_run_in_one(
    gloo_pool: GlooPool, models: Path, tmp_path: Path
) -> None:
    def run(name: str, **changes: Any) -> Any:
        options = values(
            models,
            tmp_path / name,
            model__hf_path=str(models / "model"),
            plugins__orm__shuffle=True,
            train__micro_batch_size=2,
            **changes,
        )
        return gloo_pool.run(whole_run, 2, options, timeout=100)

    # 13 steps of 4: into the second epoch of 40 pairs.
    straight = run("straight", train__train_iters=13)
    run("halves", train__train_iters=9, checkpoint__save_interval=9)
    halves = run("halves", train__train_iters=13, checkpoint__save_interval=9)
    assert_same(halves, straight)
    assert halves[0].readings == straight[0].readings
    kept = [key for key in straight[0].tensors if "score" in key]
    assert len(kept) == 4, kept  # the weight, its master copy, and Adam's two moments
    assert not [key for key in straight[0].tensors if "output_layer" in key]


def test_evaluation_has_the_metrics_of_the_held_out_file(
    gloo_pool: GlooPool, models: Path, tmp_path: Path
) -> None:
    options = values(
        models,
        tmp_path / "run",
        train__eval_interval=5,
        train__eval_iters=1,
        train__global_batch_size=7,
        train__train_iters=5,
        optimizer__lr=0.0,
    )
    (ended,) = gloo_pool.run(whole_run, 1, options, timeout=100)
    evaluated = [line for line in ended.readings if "eval_loss" in line]
    pairs = tokenized(models / "blocks", models / "held-out.jsonl")
    (plain,) = PlainRewards(model=scorer(models / "model-scorer")).steps([pairs])
    for name in ("loss", *REWARDS):
        for line in evaluated:
            assert line[f"eval_{name}"] == pytest.approx(plain[name], rel=1e-5, abs=2e-6), name
    assert len(evaluated) == 2
