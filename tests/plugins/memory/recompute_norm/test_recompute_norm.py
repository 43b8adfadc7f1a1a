"""The plugin's declarations, errors and what is planned."""

from __future__ import annotations

from typing import Any

import pytest

from ascend_run.plugin_api import Numerics, RunConfig
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.plugins.memory.recompute_norm import RecomputeNorm, RecomputeNormConfig
from ascend_run.testing.models import DENSE
from tests.support.costs import planned
from tests.support.tiny_configs import model_fields, parallel_fields


def problems(**model: Any) -> str:
    run = RunConfig(model=model_fields({"num_layers": 8, **model}), parallel=parallel_fields())
    plugin = RecomputeNorm(RecomputeNormConfig())
    return "; ".join(plugin.ascend_check(config=run))


def test_it_claims_nothing_and_changes_no_bit() -> None:
    assert claims_of(RecomputeNorm) == ()
    assert RecomputeNorm.manifest.numerics is Numerics.BITWISE


def test_counts_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="num_layers"):
        RecomputeNormConfig(num_layers=0)


def test_a_model_without_norms_before_its_sublayers_is_refused() -> None:
    assert "model.norm_placement=post" in problems(norm_placement="post")
    assert problems(norm_placement="both") == ""


def test_layers_are_counted_on_a_rank_over_its_chunks() -> None:
    plugin = RecomputeNorm(RecomputeNormConfig(num_layers=1))
    first = plugin.ascend_activation_policy(place=0, chunk=0, num_chunks=2)
    assert set(first) == {"input_layernorm", "pre_mlp_layernorm"}
    assert plugin.ascend_activation_policy(place=0, chunk=1, num_chunks=2) == {}


def test_no_flops_are_added_and_fewer_activations_are_saved() -> None:
    """Per token and layer two norms of 32 values, and a statistic of each."""
    _, (plain,) = planned(DENSE)
    _, (cost,) = planned(DENSE, ("recompute-norm",))
    assert cost.flops == plain.flops
    layers, tokens, fp32 = 2, 16, 4
    assert plain.memory.peak - cost.memory.peak == layers * tokens * 2 * (32 + 1) * fp32


def test_legacy_flags() -> None:
    flags = {flag.flag: flag.key for flag in RecomputeNorm.manifest.legacy_flags}
    assert flags == {
        "--recompute-norm": "enable",
        "--recompute-norm-num-layers": "plugins.recompute-norm.num_layers",
    }
