"""Every adapter's gradient on 1, 2 and 4 ranks against one rank, in float64, before the optimizer;
then the weights after five steps. Adapters are saved by PEFT, with random A and B."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ascend_run.testing.models import MODELS
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import RankOutcome, Trial, run_trial
from ascend_run.testing.tensors import full_tensors
from ascend_run.types.layout import AXIS_KEYS, axis_settings
from tests.plugins.fine_tuning.adapter_plans import RECOMPUTED
from tests.plugins.fine_tuning.adapter_trials import Trials, assert_parity
from tests.support.needed_plugins import names_of

CASES: dict[str, tuple[str, dict[str, int], tuple[str, ...], dict[str, Any]]] = {
    "tp=2": ("dense", {"tp": 2, "sp": 0}, (), {}),
    "tp=2 sp dp=2": ("dense", {"tp": 2, "dp": 2}, (), {}),
    "tp=4 sp, two key-value groups": ("dense", {"tp": 4}, (), {}),
    "tp=4, two key-value groups": ("dense", {"tp": 4, "sp": 0}, (), {}),
    "pp=2": ("dense", {"pp": 2}, (), {}),
    "tp=2 sp pp=2": ("dense", {"tp": 2, "pp": 2}, (), {}),
    "cp=2 tp=2 ulysses": ("dense", {"cp": 2, "tp": 2}, ("ulysses",), {}),
    "cp=2 ring": ("dense", {"cp": 2}, ("ring-attention",), {}),
    "micro-batches of two": ("dense", {}, (), {"train.micro_batch_size": 2}),
    "recompute tp=2 sp": ("dense", {"tp": 2}, (), RECOMPUTED),
    "distributed optimizer": ("dense", {"dp": 2}, (), {"ddp.use_distributed_optimizer": True}),
    "experts ep=2": ("moe", {"dp": 2, "ep": 2}, (), {}),
    "experts gmm ep=2 tp=2": ("moe", {"tp": 2, "dp": 2, "ep": 2}, ("gmm",), {}),
    "experts gmm": ("moe", {}, ("gmm",), {}),
}


@pytest.mark.exhaustive(by=lambda case: [CASES[case][0], bool(CASES[case][2]), *CASES[case][3]])
@pytest.mark.parametrize("case", names_of(CASES, lambda case: case[2]))
def test_every_adapters_gradient_is_that_of_one_rank(trials: Trials, case: str) -> None:
    model, layout, beside, config = CASES[case]
    plain = trials(model, {})
    assert_parity(trials(model, layout, beside, 0, config), plain, 1e-10)
    adapters = {name for shard in plain[0].shards for name in [shard.name]}
    parts = 4 * 2 + 2 * 2 + (0 if model == "moe" else 3 + 2) * 2
    assert len(adapters) == parts, adapters


@pytest.mark.exhaustive(by=lambda case: [CASES[case][0]])
@pytest.mark.parametrize("case", ["tp=2 sp dp=2", "pp=2", "experts ep=2", "distributed optimizer"])
def test_weights_after_five_steps_are_those_of_one_rank(trials: Trials, case: str) -> None:
    model, layout, beside, config = CASES[case]
    assert_parity(trials(model, layout, beside, 5, config), trials(model, {}, steps=5), 1e-5)


@pytest.mark.exhaustive(by=lambda layout: [*layout])
@pytest.mark.parametrize(
    ("targets", "layout"),
    [
        ("linear_fc2", {"pp": 2}),
        ("linear_fc1", {"tp": 2}),
        ("linear_proj", {}),
        ("linear_q", {"pp": 2}),
        ("linear_q", {"tp": 2}),
    ],
    ids=str,
)
def test_every_adapter_moves_under_full_recomputation(
    gloo_pool: GlooPool, targets: str, layout: dict[str, int]
) -> None:
    values = {
        **MODELS["dense"],
        "plugins.lora.target_modules": [targets],
        **RECOMPUTED,
        **axis_settings(layout),
        "parallel.sequence_parallel": "tp" in layout,
    }
    ranks = 2 if layout else 1
    few, more = (
        gloo_pool.run(
            run_trial, ranks, Trial(plugins=("lora",), config=values, steps=steps), timeout=100
        )
        for steps in (1, 3)
    )
    before, after = full_tensors(few), full_tensors(more)
    assert before.problems(1e-6) == after.problems(1e-6) == []
    assert len(after.tensors) == (6 if targets == "linear_fc1" else 4)
    for name, weight in after.tensors.items():
        assert not torch.equal(weight, before.tensors[name]), f"{name} has not moved"


DEEP = {**MODELS["dense"], "model.num_layers": 4}
STAGES: dict[str, dict[str, Any]] = {
    "virtual stages": {
        AXIS_KEYS["pp"]: 2,
        "parallel.virtual_pipeline_model_parallel_size": 2,
    },
    "an empty place": {
        AXIS_KEYS["pp"]: 2,
        "model.num_layers": 6,
        "enable": ("noop-layers",),
        "plugins.noop-layers.layers": [1, 5],
    },
}


@pytest.mark.parametrize("stages", names_of(STAGES, lambda values: values.get("enable", ())))
def test_adapters_in_a_pipeline_are_those_of_one_rank(gloo_pool: GlooPool, stages: str) -> None:
    values = {**DEEP, **STAGES[stages]}
    beside = values.pop("enable", ())
    cut, plain = (
        gloo_pool.run(
            run_trial, ranks, Trial(plugins=("lora", *names), config=config, steps=3), timeout=100
        )
        for ranks, names, config in ((2, beside, values), (1, (), DEEP))
    )
    assert_parity(cut, plain, 1e-5)


@pytest.mark.exhaustive(by=lambda: ())
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_leaves_the_copies_of_an_adapter_equal(
    gloo_pool: GlooPool, sequence_parallel: bool
) -> None:
    values = {
        **MODELS["dense"],
        AXIS_KEYS["tp"]: 2,
        "parallel.sequence_parallel": sequence_parallel,
        "plugins.lora.dropout": 0.3,
    }
    dropped, kept = (
        gloo_pool.run(
            run_trial,
            2,
            Trial(plugins=("lora",), config={**values, "plugins.lora.dropout": dropout}, steps=3),
            timeout=100,
        )
        for dropout in (0.3, 0.0)
    )
    whole = full_tensors(dropped)
    assert whole.problems() == []
    assert dropped[0].losses[-1] != kept[0].losses[-1]


def initial(ranks: Sequence[RankOutcome]) -> dict[str, torch.Tensor]:
    return dict(full_tensors(ranks).tensors)


def test_initial_adapters_do_not_depend_on_the_layout(gloo_pool: GlooPool) -> None:
    values = {**MODELS["dense"], "optimizer.lr": 0.0, "optimizer.min_lr": 0.0}
    one, two = (
        initial(
            gloo_pool.run(
                run_trial,
                ranks,
                Trial(plugins=("lora",), config={**values, **flags}, steps=1),
                timeout=100,
            )
        )
        for ranks, flags in (
            (1, {}),
            (2, {AXIS_KEYS["tp"]: 2, "parallel.sequence_parallel": True}),
        )
    )
    assert one.keys() == two.keys()
    for name, weight in one.items():
        assert torch.equal(weight, two[name]), name
        if "lora_B" in name:
            assert not weight.any()
        else:
            bound = weight.shape[1] ** -0.5
            assert 0.8 * bound < weight.abs().max() <= bound
