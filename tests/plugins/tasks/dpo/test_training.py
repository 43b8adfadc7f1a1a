"""Ten steps against transformers and torch: losses and every metric, in each variant and layout.
Then the reference, resuming, and evaluation."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ascend_run.ops.preference_loss import METRICS
from ascend_run.testing.pool import GlooPool
from tests.core.train.runs import assert_the_same_in_two_halves, whole_run
from tests.support.needed_plugins import names_of
from tests.support.plain_preferences import PlainSteps, smoothed
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

PACKS = 3
"""Samples that the held-out pairs fill: two, three and two of them."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models_and_pairs(tmp_path_factory.mktemp("dpo"), STEPS * BATCH)


def plain_steps(models: Path, model: str = "model", **options: Any) -> list[dict[str, float]]:
    pairs = tokenized(models / "blocks", models / "train.jsonl")
    return list(PlainSteps(folder=models / model, **options).steps(batches_of(pairs)))


Plain = Callable[[str], list[dict[str, float]]]


@pytest.fixture(scope="module")
def plain(models: Path) -> Plain:
    """Return the steps of a model, which are run once."""
    return functools.cache(partial(plain_steps, models))


values = partial(ten_steps, "dpo")
LAYOUTS = layouts_without("pp=2, tied")


@pytest.mark.exhaustive(by=lambda layout: [LAYOUTS[layout][0] > 1, bool(LAYOUTS[layout][2])])
@pytest.mark.parametrize("layout", names_of(LAYOUTS, lambda case: case[2]))
def test_ten_steps_are_those_of_transformers(
    gloo_pool: GlooPool, models: Path, plain: Plain, tmp_path: Path, layout: str
) -> None:
    ranks, changes, plugins = LAYOUTS[layout]
    run = values(models, tmp_path / "run", **changes)
    ended = gloo_pool.run(whole_run, ranks, run, plugins, timeout=100)
    steps = plain(changes.get("model", "model"))
    assert_equal_steps(ended[0].readings, steps)
    assert steps[0]["rewards/margins"] == 0.0
    assert steps[-1]["rewards/margins"] > 0.05


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "smoothing": ({"label_smoothing": 0.2}, {"loss": smoothed(0.1, 0.2)}),
    "robust": (
        {"loss": "robust", "label_smoothing": 0.1},
        {
            "loss": lambda c, r: (
                (
                    -0.9 * torch.sigmoid(0.1 * (c - r)).log()
                    + 0.1 * torch.sigmoid(0.1 * (r - c)).log()
                )
                / 0.8
            )
        },
    ),
    "hinge": (
        {"loss": "hinge", "beta": 0.5},
        {"loss": lambda c, r: (1 - 0.5 * (c - r)).clamp(min=0), "beta": 0.5},
    ),
    "ipo": ({"loss": "ipo"}, {"loss": lambda c, r: (c - r - 5) ** 2, "averages": True}),
    "reference-free": ({"reference_free": True}, {"reference_free": True}),
    "sft_weight": ({"sft_weight": 0.5}, {"sft_weight": 0.5}),
}


@pytest.mark.exhaustive(by=lambda variant: [variant in ("ipo", "reference-free")])
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_is_that_of_transformers(
    gloo_pool: GlooPool, models: Path, tmp_path: Path, variant: str
) -> None:
    ours, theirs = VARIANTS[variant]
    options = {f"plugins__dpo__{name}": value for name, value in ours.items()}
    run = values(models, tmp_path / "run", train__micro_batch_size=2, **options)
    (ended,) = gloo_pool.run(whole_run, 1, run, timeout=100)
    assert_equal_steps(ended.readings, plain_steps(models, **theirs))


def test_another_reference_is_loaded_from_its_folder(
    gloo_pool: GlooPool, models: Path, tmp_path: Path
) -> None:
    other = models / "other"
    run = values(models, tmp_path / "run", plugins__dpo__reference=str(other))
    (ended,) = gloo_pool.run(whole_run, 1, run, timeout=100)
    plain = plain_steps(models, reference=other)
    assert_equal_steps(ended.readings, plain)
    assert abs(plain[0]["rewards/margins"]) > 0.01


@pytest.mark.parametrize("packing", [False, True])
def test_packed_pairs_cost_what_they_cost_alone(
    gloo_pool: GlooPool, models: Path, tmp_path: Path, packing: bool
) -> None:
    """The seven held-out pairs in one step; packed they fill three samples, of unequal numbers."""
    at_once = held_out_in_a_step("dpo", models, packs=PACKS if packing else 0)
    run = values(models, tmp_path / "run", **at_once)
    (ended,) = gloo_pool.run(whole_run, 1, run, timeout=100)
    pairs = tokenized(models / "blocks", models / "held-out.jsonl")
    plain = list(PlainSteps(folder=models / "model").steps([pairs]))
    assert_equal_steps(ended.readings, plain)


def test_the_reference_is_not_saved(gloo_pool: GlooPool, models: Path, tmp_path: Path) -> None:
    (ended,) = gloo_pool.run(whole_run, 1, values(models, tmp_path / "run"), timeout=100)
    assert not [key for key in ended.tensors if "reference" in key]
    (free,) = gloo_pool.run(
        whole_run,
        1,
        values(models, tmp_path / "free", plugins__dpo__reference_free=True),
        timeout=100,
    )
    assert ended.tensors.keys() == free.tensors.keys()


@pytest.mark.parametrize("other", [False, True], ids=["own weights", "another folder"])
def test_a_run_in_two_halves_is_the_run_in_one(
    gloo_pool: GlooPool, models: Path, tmp_path: Path, other: bool
) -> None:
    def run(name: str, **changes: Any) -> Any:
        reference = {"plugins__dpo__reference": str(models / "other")} if other else {}
        options = values(
            models,
            tmp_path / name,
            plugins__dpo__shuffle=True,
            train__micro_batch_size=2,
            **reference,
            **changes,
        )
        return gloo_pool.run(whole_run, 2, options, timeout=100)

    # 13 steps of 4: into the second epoch of 40 pairs.
    assert_the_same_in_two_halves(run, 13, 9)


def test_a_run_does_not_resume_beside_another_reference(
    gloo_pool: GlooPool, models: Path, tmp_path: Path
) -> None:
    def run(reference: str, **changes: Any) -> Any:
        options = values(
            models,
            tmp_path / changes.pop("name", "run"),
            plugins__dpo__reference=reference,
            **{"train__train_iters": 2, "checkpoint__save_interval": 1, **changes},
        )
        return gloo_pool.run(whole_run, 1, options, timeout=100)

    changing = tmp_path / "changing"
    shutil.copytree(models / "other", changing)
    run(str(models / "other"))
    whole = {"train__train_iters": 3}
    with pytest.raises(Exception, match="cannot resume beside another model") as caught:
        run(str(models / "model"), **whole)
    assert (
        f"reference: the checkpoint's is {models / 'other'}, this run's is {models / 'model'}; "
        "name the same weights, or start from scratch in another run.output_dir"
    ) in str(caught.value)
    # A branch is another run; and the same weights may lie elsewhere.
    ours = str(tmp_path / "run" / "checkpoints")
    run(str(models / "model"), **whole, checkpoint__load=ours, name="branch")
    run(str(changing), **whole)
    shutil.copy(models / "model" / "model.safetensors", changing)
    with pytest.raises(Exception, match=f"this run's is {changing}, which has changed;"):
        run(str(changing), train__train_iters=4)


def test_evaluation_has_the_metrics_of_the_held_out_file(
    gloo_pool: GlooPool, models: Path, tmp_path: Path
) -> None:
    reference = {"plugins__dpo__reference": str(models / "other")}
    options = values(models, tmp_path / "run", **EVALUATED, **reference)
    (ended,) = gloo_pool.run(whole_run, 1, options, timeout=100)
    pairs = tokenized(models / "blocks", models / "held-out.jsonl")
    steps = PlainSteps(folder=models / "model", reference=models / "other")
    (plain,) = steps.steps([pairs])
    assert abs(plain["rewards/margins"]) > 0.01
    assert_evaluated_twice(ended.readings, plain, METRICS)


@pytest.mark.needs_plugins("lora")
@pytest.mark.exhaustive(by=lambda layout: [LAYOUTS[layout][0] > 1])
@pytest.mark.parametrize("layout", ["one", "tp=2, sp", "pp=2, vpp=2", "dp=2"])
def test_the_base_of_adapters_is_the_reference_as_a_second_model_is(
    gloo_pool: GlooPool, models: Path, tmp_path: Path, layout: str
) -> None:
    ranks, changes, _ = LAYOUTS[layout]
    model = str(models / changes.get("model", "model"))
    changes = {**changes, "plugins__lora__rank": 4, "plugins__lora__export": False}

    def run(name: str, **more: Any) -> Any:
        options = values(models, tmp_path / name, **changes, **more)
        return gloo_pool.run(whole_run, ranks, options, ("lora",), timeout=100)[0]

    second = run("second", plugins__dpo__reference=model)
    base = run("base")  # by default
    logged = {name: (tmp_path / name / "log.jsonl").read_text() for name in ("second", "base")}
    for name, weights in (("second", model), ("base", "base")):
        assert f'"weights": "{weights}"' in logged[name]
    assert '"dpo.reference"' in logged["base"]
    assert_equal_steps(base.readings, second.readings)
    assert base.readings[-1]["rewards/margins"] > 0.01
    assert base.readings[0]["rewards/margins"] == 0.0
