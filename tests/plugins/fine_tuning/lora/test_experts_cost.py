"""The plan of a run with adapters of experts, against what a run allocates, sends and computes."""

from __future__ import annotations

from typing import Any

import pytest

from ascend_run.testing.models import MOE
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import Trial
from tests.support.communication import differences
from tests.support.costs import planned
from tests.tools.plan.cost_model.cost_jobs import count_flops

EXPERTS = {"plugins.lora.rank": 2, "plugins.lora.target_modules": ["experts"]}
BALANCED = {"model.moe_router_force_load_balancing": True}


@pytest.mark.parametrize(
    ("targets", "width"),
    [
        (["experts"], (32 + 96) + (48 + 32)),
        (["experts_fc1"], 32 + 96),
        (["experts_fc2"], 48 + 32),
    ],
)
@pytest.mark.parametrize("ep", [1, 2])
def test_each_expert_has_its_own_matrices(targets: list[str], width: int, ep: int) -> None:
    layout = {"parallel.expert_model_parallel_size": ep}
    (_, (plain,)) = planned({**MOE, **layout}, world_size=ep)
    config = {**MOE, **layout, **EXPERTS, "plugins.lora.target_modules": targets}
    (_, (cost,)) = planned(config, ("lora",), world_size=ep)
    assert cost.trained_parameters == 2 * (4 // ep) * 2 * width
    assert cost.parameters == plain.parameters + cost.trained_parameters


@pytest.mark.parametrize("targets", [["experts"], ["experts_fc2"]])
def test_the_gradients_of_the_sums_are_counted(gloo_pool: GlooPool, targets: list[str]) -> None:
    """As torch counts the products."""
    config: dict[str, Any] = {**MOE, **BALANCED, "plugins.lora.rank": 2}
    ours = {**config, "plugins.lora.target_modules": targets}
    other = {**config, "plugins.lora.target_modules": ["linear_proj"]}
    (_, (cost,)), (_, (linear,)) = (planned(values, ("lora",)) for values in (ours, other))
    (((products, _),), ((fewer, _),)) = (
        gloo_pool.run(count_flops, 1, Trial(config=values, plugins=("lora",)))
        for values in (ours, other)
    )
    assert cost.flops - linear.flops == products - fewer


def test_the_sums_are_saved_for_backward() -> None:
    """An element of float32 for each of the weights, in both layers, in one micro-batch; and of one
    layer the gradient of each expert, and their stack."""
    (_, (both,)), (_, (fc2,)) = (
        planned({**MOE, **EXPERTS, "plugins.lora.target_modules": targets}, ("lora",))
        for targets in (["experts"], ["experts_fc2"])
    )
    saved = [{tensor.key: tensor.nbytes for tensor in cost.rank.saved[0]} for cost in (both, fc2)]
    assert saved[0] == saved[1], "of the plain model"
    inputs, fc1 = 16 * 2 * 32 * 4, 4 * 96 * 32 * 4
    assert both.memory.activations - fc2.memory.activations == 2 * (fc1 + inputs) + 2 * fc1


@pytest.mark.needs_plugins("moe-zero-memory")
def test_sums_that_are_formed_again_are_not_saved() -> None:
    """Only those of the layer whose backward runs exist."""
    beside = ("lora", "moe-zero-memory")
    (_, (both,)), (_, (fc2,)) = (
        planned({**MOE, **EXPERTS, "plugins.lora.target_modules": targets}, beside)
        for targets in (["experts"], ["experts_fc2"])
    )
    fc1 = 4 * 96 * 32 * 4
    # Its sums, the gradients of its experts and their stack; the tokens are kept in any case.
    assert both.memory.activations - fc2.memory.activations == fc1 + 2 * fc1


@pytest.mark.exhaustive(by=lambda: ())
def test_replicated_matrices_of_experts_send_what_was_expected(gloo_pool: GlooPool) -> None:
    config = {
        **MOE,
        **EXPERTS,
        "data.seq_length": 64,
        "model.num_moe_experts": 16,
        "parallel.tensor_model_parallel_size": 2,
        "parallel.sequence_parallel": True,
        "parallel.expert_tensor_parallel_size": 2,
    }
    assert differences(gloo_pool, config, ("lora",)) == []
