"""Ten steps against transformers and torch: losses, gradient norms and every metric, in each
variant and layout. Then resuming, packing and evaluation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ascend_run.ops.preference_loss import REWARDS
from ascend_run.testing.pool import GlooPool
from tests.core.train.runs import assert_the_same_in_two_halves, whole_run
from tests.support.needed_plugins import names_of
from tests.support.plain_rewards import PlainRewards, scorer, write_scorer
from tests.support.preference_files import (
    assert_equal_steps,
    assert_evaluated_twice,
    tokenized,
    write_models_and_pairs,
)
from tests.support.task_runs import (
    BATCH,
    EVALUATED,
    STEPS,
    batches_of,
    held_out_in_a_step,
    layouts_without,
    ten_steps,
)
from tests.support.tiny_llama import write_llama

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


def plain_steps(models: Path, model: str = "model", **options: Any) -> list[dict[str, float]]:
    pairs = tokenized(models / "blocks", models / "train.jsonl")
    plain = PlainRewards(model=scorer(models / f"{model}-scorer"), **options)
    return list(plain.steps(batches_of(pairs)))


Plain = Callable[[str], list[dict[str, float]]]


@pytest.fixture(scope="module")
def plain(models: Path) -> Plain:
    """Return the steps of a model, which are run once."""
    return functools.cache(partial(plain_steps, models))


def values(models: Path, output: Path, *, model: str = "model", **changes: Any) -> dict[str, Any]:
    return ten_steps("orm", models, output, model=f"{model}-scorer", **changes)


LAYOUTS = layouts_without("pp=2, two rows")


@pytest.mark.exhaustive(by=lambda layout: [LAYOUTS[layout][0] > 1, bool(LAYOUTS[layout][2])])
@pytest.mark.parametrize("layout", names_of(LAYOUTS, lambda case: case[2]))
def test_ten_steps_are_those_of_transformers(
    gloo_pool: GlooPool, models: Path, plain: Plain, tmp_path: Path, layout: str
) -> None:
    ranks, changes, plugins = LAYOUTS[layout]
    run = values(models, tmp_path / "run", **changes)
    ended = gloo_pool.run(whole_run, ranks, run, plugins, timeout=100)
    steps = plain(changes.get("model", "model"))
    assert_equal_steps(ended[0].readings, steps, REWARDS)
    assert steps[-1]["loss"] < 0.8 * steps[0]["loss"]


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
    at_once = held_out_in_a_step("orm", models, packs=PACKS if packing else 0)
    run = values(models, tmp_path / "run", **at_once)
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
    straight = assert_the_same_in_two_halves(run, 13, 9)
    kept = [key for key in straight[0].tensors if "score" in key]
    assert len(kept) == 4, kept  # the weight, its master copy, and Adam's two moments
    assert not [key for key in straight[0].tensors if "output_layer" in key]


def test_evaluation_has_the_metrics_of_the_held_out_file(
    gloo_pool: GlooPool, models: Path, tmp_path: Path
) -> None:
    (ended,) = gloo_pool.run(
        whole_run, 1, values(models, tmp_path / "run", **EVALUATED), timeout=100
    )
    pairs = tokenized(models / "blocks", models / "held-out.jsonl")
    (plain,) = PlainRewards(model=scorer(models / "model-scorer")).steps([pairs])
    assert_evaluated_twice(ended.readings, plain, REWARDS)
