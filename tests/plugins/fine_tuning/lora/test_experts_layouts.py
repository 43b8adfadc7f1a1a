"""Adapters of routed experts in layouts, with each kernel and dispatcher, against one rank."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch

from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import Trial, run_trial
from ascend_run.testing.tensors import full_tensors
from ascend_run.types.layout import AXIS_KEYS
from tests.plugins.fine_tuning.adapter_plans import RECOMPUTED
from tests.plugins.fine_tuning.adapter_trials import Trials, assert_parity
from tests.support.needed_plugins import names_of

EXPERT_TP: Final = {"parallel.expert_tensor_parallel_size": 2}
PADDED: Final = {
    "model.moe_expert_capacity_factor": 1.99,
    "model.moe_pad_expert_input_to_capacity": True,
}
"""Each expert has room for all of the 16 tokens, so none is dropped."""
CASES: dict[str, tuple[dict[str, int], tuple[str, ...], dict[str, Any]]] = {
    "ep=2 tp=2 sp gmm": ({"tp": 2, "dp": 2, "ep": 2}, ("gmm",), {}),
    "expert tp=2": ({"tp": 2}, (), EXPERT_TP),
    "expert tp=2 ep=2 dp=2 gmm": ({"tp": 2, "dp": 2, "ep": 2}, ("gmm",), EXPERT_TP),
    "ep=2": ({"dp": 2, "ep": 2}, (), {}),
    "tp=2 sp": ({"tp": 2}, (), {}),
    "pp=2": ({"pp": 2}, (), {}),
    "cp=2 ulysses": ({"cp": 2}, ("ulysses",), {}),
    "gmm": ({}, ("gmm",), {}),
    "recompute ep=2": ({"dp": 2, "ep": 2}, (), RECOMPUTED),
    "moe-zero-memory ep=2": ({"dp": 2, "ep": 2}, ("moe-zero-memory",), {}),
    "distributed optimizer ep=2": (
        {"dp": 4, "ep": 2},
        (),
        {"ddp.use_distributed_optimizer": True},
    ),
    "moe-bmm-fused ep=2": ({"dp": 2, "ep": 2}, ("moe-bmm-fused",), PADDED),
    "gathered in forward ep=2": (
        {"dp": 4, "ep": 2},
        (),
        {
            "ddp.use_distributed_optimizer": True,
            "ddp.overlap_grad_reduce": True,
            "ddp.overlap_param_gather": True,
        },
    ),
    "hot-experts ep=2": (
        {"dp": 2, "ep": 2},
        ("hot-experts",),
        {"plugins.hot-experts.num_experts": 1},
    ),
    "moe-alltoall in two chunks ep=2": (
        {"dp": 2, "ep": 2},
        ("moe-alltoall",),
        {"plugins.moe-alltoall.overlap_chunks": 2},
    ),
    "moe-allgather in two chunks ep=2": (
        {"dp": 2, "ep": 2},
        ("moe-allgather",),
        {
            "plugins.moe-allgather.overlap_chunks": 2,
            "model.moe_token_dispatcher_type": "allgather",
        },
    ),
}


@pytest.mark.exhaustive(by=lambda case: [CASES[case][2] is EXPERT_TP and not CASES[case][1]])
@pytest.mark.parametrize("case", names_of(CASES, lambda case: case[1]))
def test_every_gradient_is_that_of_one_rank(trials: Trials, case: str) -> None:
    layout, beside, config = CASES[case]
    plain = trials("experts", {})
    assert_parity(trials("experts", layout, beside, 0, config), plain, 1e-10)
    named = [name for name in full_tensors(plain).tensors if "mlp.experts.adapter" in name]
    assert len(named) == 2 * 5


STEPS: Final = (
    "ep=2",
    "expert tp=2",
    "distributed optimizer ep=2",
    "gathered in forward ep=2",
)


@pytest.mark.exhaustive(by=lambda case: [case == "ep=2"])
@pytest.mark.parametrize("case", STEPS)
def test_weights_after_five_steps_are_those_of_one_rank(trials: Trials, case: str) -> None:
    layout, beside, config = CASES[case]
    plain = trials("experts", {}, steps=5)
    assert_parity(trials("experts", layout, beside, 5, config), plain, 1e-5)


def test_virtual_stages_are_one_rank(gloo_pool: GlooPool, trials: Trials) -> None:
    values = {**trials.models["experts"], "model.num_layers": 4}
    stages = {AXIS_KEYS["pp"]: 2, "parallel.virtual_pipeline_model_parallel_size": 2}
    cut, plain = (
        gloo_pool.run(
            run_trial, ranks, Trial(plugins=("lora",), config=config, steps=3), timeout=100
        )
        for ranks, config in ((2, {**values, **stages}), (1, values))
    )
    assert_parity(cut, plain, 1e-5)


def test_initial_adapters_do_not_depend_on_the_layout(gloo_pool: GlooPool, trials: Trials) -> None:
    values = {**trials.models["experts"], "optimizer.lr": 0.0, "optimizer.min_lr": 0.0}
    cut = {AXIS_KEYS["tp"]: 2, "parallel.sequence_parallel": True, **EXPERT_TP}
    by_expert = {AXIS_KEYS["ep"]: 2}
    one, *others = (
        full_tensors(
            gloo_pool.run(
                run_trial,
                ranks,
                Trial(plugins=("lora",), config={**values, **layout}, steps=1),
                timeout=100,
            )
        ).tensors
        for ranks, layout in ((1, {}), (2, cut), (2, by_expert))
    )
    experts = {name: weight for name, weight in one.items() if ".experts." in name}
    assert len(experts) == 2 * 5
    for name, weight in experts.items():
        assert all(torch.equal(weight, other[name]) for other in others), name
        if "lora_B" in name:
            assert not weight.any()
        else:
            bound = weight.shape[2] ** -0.5
            assert 0.8 * bound < weight.abs().max() <= bound
            assert not torch.equal(weight[0], weight[1])
