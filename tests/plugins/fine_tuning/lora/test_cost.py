"""Only adapters are trained, and the plan has their sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import Trial
from tests.plugins.fine_tuning.adapter_plans import RECOMPUTED
from tests.support.communication import differences
from tests.support.costs import planned
from tests.support.latent_models import MODEL as LATENT
from tests.support.saved_tensors import expected_bytes, saved_bytes
from tests.tools.plan.cost_model.cost_jobs import count_flops


@pytest.mark.parametrize(
    ("targets", "width"),
    [
        (["linear_proj"], 32 + 32),
        (["linear_q"], 32 + 32),
        (["linear_fc1_up", "linear_fc2"], (32 + 48) + (48 + 32)),
        (["all-linear"], (3 * 32 + 32 + 2 * 8) + (32 + 32) + (2 * 32 + 96) + (48 + 32)),
    ],
)
def test_only_adapters_are_trained(targets: list[str], width: int) -> None:
    _, (plain,) = planned(DENSE)
    config = {**DENSE, "plugins.lora.target_modules": targets, "plugins.lora.rank": 4}
    _, (cost,) = planned(config, ("lora",))
    assert cost.trained_parameters == 2 * 4 * width
    assert cost.parameters == plain.parameters + cost.trained_parameters
    assert cost.memory.optimizer < plain.memory.optimizer / 2


@pytest.mark.parametrize(
    ("targets", "width"),
    [
        (["linear_q_down_proj", "linear_q_up_proj"], (32 + 12) + (12 + 8 * 10)),
        (["linear_kv_down_proj", "linear_kv_up_proj"], (32 + 14) + (10 + 8 * 13)),
        (["linear_proj"], 8 * 7 + 32),
        (["shared_experts"], ((2 * 32 + 64) + (32 + 32)) / 2),
        (["linear_fc2"], ((48 + 32) + (32 + 32)) / 2),
    ],
)
def test_adapters_of_latents_have_their_widths(targets: list[str], width: int) -> None:
    """Eight heads of 6 + 4 and values of 7, latents of 12 and 10. One layer is dense; the other's
    shared experts are 32 wide."""
    _, (plain,) = planned(LATENT)
    config = {**LATENT, "plugins.lora.target_modules": targets, "plugins.lora.rank": 4}
    _, (cost,) = planned(config, ("lora",))
    assert cost.trained_parameters == 2 * 4 * width
    assert cost.parameters == plain.parameters + cost.trained_parameters


def test_ranks_by_module_are_counted() -> None:
    """Queries of 32, keys and values of 8."""
    config = {
        **DENSE,
        "plugins.lora.target_modules": ["linear_qkv", "linear_fc2"],
        "plugins.lora.rank": 4,
        "plugins.lora.rank_pattern": {"linear_qkv": 2, "linear_v": 3, "linear_fc2": 5},
    }
    _, (cost,) = planned(config, ("lora",))
    width = 2 * (32 + 32) + 2 * (32 + 8) + 3 * (32 + 8) + 5 * (48 + 32)
    assert cost.trained_parameters == 2 * width


@pytest.mark.exhaustive(by=lambda sequence_parallel: [sequence_parallel])
@pytest.mark.parametrize(
    ("ranks", "sequence_parallel"), [(2, True), (2, False), (4, True)], ids=str
)
def test_adapters_send_what_was_expected(
    gloo_pool: GlooPool, ranks: int, sequence_parallel: bool
) -> None:
    """Four tensor-parallel ranks share two key-value groups."""
    config = {
        **DENSE,
        "data.seq_length": 64,
        "parallel.tensor_model_parallel_size": ranks,
        "parallel.sequence_parallel": sequence_parallel,
        "plugins.lora.target_modules": ["linear_q", "linear_v", "linear_proj", "linear_fc1"],
        "plugins.lora.rank_pattern": {"linear_v": 4, "linear_fc1": 2},
    }
    assert differences(gloo_pool, config, ("lora",)) == []


@pytest.mark.exhaustive(by=lambda: ())
@pytest.mark.parametrize(
    ("targets", "overlaps"),
    [
        (["all-linear"], False),
        (["linear_q_up_proj", "linear_kv_down_proj"], False),
        (["shared_experts"], True),
    ],
)
def test_adapters_of_latents_send_what_was_expected(
    gloo_pool: GlooPool, targets: list[str], overlaps: bool
) -> None:
    config = {
        **LATENT,
        "data.seq_length": 64,
        "model.num_moe_experts": 16,
        "parallel.tensor_model_parallel_size": 2,
        "parallel.sequence_parallel": True,
        "model.moe_token_dispatcher_type": "alltoall",
        "model.moe_shared_expert_overlap": overlaps,
        "plugins.lora.target_modules": targets,
    }
    assert differences(gloo_pool, config, ("lora",)) == []


_NARROW = {"plugins.lora.rank": 2}


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (DENSE, _NARROW),
        ({**DENSE, **RECOMPUTED}, {**_NARROW, "plugins.lora.target_modules": ["linear_q"]}),
        ({**MOE, "model.share_embeddings_and_output_weights": True}, _NARROW),
        (LATENT, {**_NARROW, "plugins.lora.target_modules": ["linear_q_up_proj"]}),
        (LATENT, {**_NARROW, "plugins.lora.target_modules": ["shared_experts_fc1", "linear_fc2"]}),
    ],
    ids=["every-linear", "queries-computed-again", "beside-experts", "latents", "shared-experts"],
)
def test_frozen_weights_take_no_product_for_their_gradient(
    gloo_pool: GlooPool, config: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """As torch counts them; the attention is that of the plain model."""
    _, (plain,) = planned(config)
    _, (cost,) = planned({**config, **options}, ("lora",))

    (((products, _),), ((plain_matmuls, _),)) = (
        gloo_pool.run(count_flops, 1, trial)
        for trial in (Trial(config={**config, **options}, plugins=("lora",)), Trial(config=config))
    )

    assert cost.flops - plain.flops == products - plain_matmuls
    assert cost.model_flops < plain.model_flops


def test_activations_that_adapters_of_shared_experts_read_are_saved(gloo_pool: GlooPool) -> None:
    """And those that the router reads, which is trained in full; beside those of one linear."""
    trained: tuple[dict[str, Any], ...] = (
        {"plugins.lora.target_modules": ["linear_proj"]},
        {"plugins.lora.target_modules": ["shared_experts_fc1"]},
        {"plugins.lora.target_modules": ["shared_experts_fc2"]},
        {"plugins.lora.target_modules": ["all-linear"]},
        {
            "plugins.lora.target_modules": ["linear_proj"],
            "plugins.lora.modules_to_save": ["router"],
        },
    )
    configs = [{**LATENT, **_NARROW, **options} for options in trained]
    (found,) = gloo_pool.run(saved_bytes, 1, [(("lora",), config) for config in configs])
    expected = [
        expected_bytes(cost) for config in configs for cost in planned(config, ("lora",))[1]
    ]
    assert [one - found[0] for one in found] == [one - expected[0] for one in expected]
    assert len({*found}) == len(trained)
