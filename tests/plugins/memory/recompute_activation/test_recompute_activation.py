"""The plugin's declarations, errors and what is planned."""

from __future__ import annotations

from typing import Any

import pytest

from ascend_run.plugin_api import ConfigError, Numerics, RunConfig
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.plugins.memory.recompute_activation import (
    RecomputeActivation,
    RecomputeActivationConfig,
)
from ascend_run.testing.models import DENSE, MOE
from tests.support.costs import planned
from tests.support.tiny_configs import model_fields, parallel_fields

LAYERS, TOKENS, FP32 = 2, 16, 4
SHARED = {"moe_shared_expert_intermediate_size": 24}


def problems(**model: Any) -> str:
    run = RunConfig(model=model_fields({"num_layers": 8, **model}), parallel=parallel_fields())
    plugin = RecomputeActivation(RecomputeActivationConfig())
    return "; ".join(plugin.ascend_check(config=run))


def treated(num_layers: int | None, num_chunks: int = 1, **model: Any) -> list[tuple[int, int]]:
    """Places and chunks whose activation is discarded, of four places in each chunk."""
    plugin = RecomputeActivation(RecomputeActivationConfig(num_layers=num_layers))
    run = RunConfig(model=model_fields(model), parallel=parallel_fields())
    has_experts = bool(model.get("num_moe_experts"))
    return [
        (place, chunk)
        for chunk in range(num_chunks)
        for place in range(4)
        if plugin.ascend_activation_policy(
            config=run, has_experts=has_experts, place=place, chunk=chunk, num_chunks=num_chunks
        )
    ]


def test_it_claims_nothing_and_changes_no_bit() -> None:
    assert claims_of(RecomputeActivation) == ()
    assert RecomputeActivation.manifest.numerics is Numerics.BITWISE


def test_a_count_of_no_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="num_layers"):
        RecomputeActivationConfig(num_layers=0)


def test_layers_are_counted_on_a_rank_over_its_chunks() -> None:
    assert treated(None, 2) == [(place, chunk) for chunk in (0, 1) for place in range(4)]
    assert treated(3) == [(0, 0), (1, 0), (2, 0)]
    assert treated(3, 2) == [(0, 0), (1, 0), (0, 1)]


def test_only_shared_experts_have_an_activation_that_it_recomputes() -> None:
    experts = {"num_moe_experts": 2}
    assert treated(1, **experts) == []
    assert treated(1, **experts, moe_shared_expert_overlap=True, **SHARED) == []
    assert treated(1, **experts, **SHARED) == [(0, 0)]
    with pytest.raises(ConfigError, match=r"recompute-activation: .* of no layer of this model"):
        planned(MOE, ("recompute-activation",))
    planned({**MOE, "model.moe_layer_freq": 2}, ("recompute-activation",))


def test_an_activation_that_saves_its_output_only_is_refused() -> None:
    assert "model.activation=relu" in problems(activation="relu", gated_linear_unit=False)
    assert problems(activation="relu", gated_linear_unit=True) == ""


def test_full_recomputation_by_blocks_goes_with_it_and_by_groups_does_not() -> None:
    """By blocks, the layers that are not recomputed whole discard their activation."""
    full = {"model.recompute_granularity": "full", "model.recompute_num_layers": 1}
    options = {**DENSE, **full}
    planned({**options, "model.recompute_method": "block"}, ("recompute-activation",))
    with pytest.raises(ConfigError, match=r"model\.recompute_granularity recomputes already"):
        planned({**options, "model.recompute_method": "uniform"}, ("recompute-activation",))


def test_a_selective_recomputation_of_other_modules_goes_with_it() -> None:
    selective = {**DENSE, "model.recompute_granularity": "selective"}
    planned(selective, ("recompute-activation",))
    with pytest.raises(ConfigError, match=r"model\.recompute_modules recomputes already"):
        planned({**selective, "model.recompute_modules": ["mlp"]}, ("recompute-activation",))


def test_no_flops_are_added_and_fewer_activations_are_saved() -> None:
    """Two of four values for each column of the feed-forward."""
    _, (plain,) = planned(DENSE)
    _, (cost,) = planned(DENSE, ("recompute-activation",))
    assert cost.flops == plain.flops
    assert plain.memory.peak - cost.memory.peak == LAYERS * 2 * TOKENS * FP32 * 48


def test_level_and_legacy_flags() -> None:
    flags = {flag.flag: flag.key for flag in RecomputeActivation.manifest.legacy_flags}
    assert flags == {
        "--recompute-activation-function": "enable",
        "--recompute-activation-function-num-layers": "plugins.recompute-activation.num_layers",
    }


def test_experts_keep_their_own_activation() -> None:
    """The peak is in the backward of the last layer, whose own are recomputed by then."""
    values = {**MOE, **{f"model.{name}": value for name, value in SHARED.items()}}
    _, (plain,) = planned(values)
    _, (cost,) = planned(values, ("recompute-activation",))
    saved = plain.memory.activations - cost.memory.activations
    assert saved == (LAYERS - 1) * 2 * TOKENS * FP32 * 24
