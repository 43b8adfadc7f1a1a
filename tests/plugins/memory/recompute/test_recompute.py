"""The plugin's declarations, errors and cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ascend_run.plugin_api import ConfigError, Layout, Numerics, RunConfig
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.plugins.memory.recompute import Recompute, RecomputeConfig
from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
from tests.support.communication import differences
from tests.support.costs import planned
from tests.support.tiny_configs import model_fields, parallel_fields

MEGATRONS = {
    "model.recompute_granularity": "full",
    "model.recompute_method": "block",
    "model.recompute_num_layers": 1,
}
LONGER = {"data.seq_length": 64}
SEQUENCE = {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}


def problems(layout: Layout | None = None, **options: Any) -> str:
    run = RunConfig(model=model_fields({"num_layers": 8}), parallel=parallel_fields())
    plugin = Recompute(RecomputeConfig(**options))
    return "; ".join(plugin.ascend_check(config=run, layout=layout or Layout()))


def test_it_claims_nothing_and_changes_no_bit() -> None:
    assert claims_of(Recompute) == ()
    assert Recompute.manifest.numerics is Numerics.BITWISE


@pytest.mark.parametrize(
    "options",
    [
        {"granularity": "some"},
        {"method": "every"},
        {"num_layers": -1},
        {"modules": ()},
        {"modules": ("moe_act",)},
        {"modules": ("mlp", "mlp")},
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(options: Mapping[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        RecomputeConfig(**options)


def test_more_layers_than_a_rank_has_are_refused() -> None:
    halves = Layout(world_size=2, pp=2)
    assert problems(halves, num_layers=4) == ""
    told = "plugins.recompute.num_layers=5 is more than the 4 layers of a pipeline rank"
    assert told in problems(halves, num_layers=5)


def test_scores_are_recomputed_in_every_layer() -> None:
    told = problems(granularity="selective", modules=("core_attn", "mlp"), num_layers=1)
    assert "num_layers=1 does not go with core_attn in plugins.recompute.modules" in told


def test_an_option_of_megatron_that_says_otherwise_is_refused() -> None:
    uniform = {**DENSE, "plugins.recompute.method": "uniform"}
    planned(uniform, ("recompute",))
    with pytest.raises(ConfigError, match=r"recompute_granularity=selective is not the full"):
        planned({**uniform, "model.recompute_granularity": "selective"}, ("recompute",))


def test_layers_that_megatron_recomputes_are_not_recomputed_again() -> None:
    told = "'model.recompute_granularity' and 'recompute' both treat .* a whole layer, in layer 0;"
    with pytest.raises(ConfigError, match=told):
        planned({**DENSE, **MEGATRONS}, ("recompute",))


def test_a_block_costs_what_megatrons_does() -> None:
    _, (megatrons,) = planned({**DENSE, **MEGATRONS})
    _, (cost,) = planned({**DENSE, "plugins.recompute.num_layers": 1}, ("recompute",))
    assert (cost.flops, cost.memory) == (megatrons.flops, megatrons.memory)
    assert cost.communication == megatrons.communication


def test_layers_are_counted_on_a_rank_over_its_chunks() -> None:
    plugin = Recompute(RecomputeConfig(num_layers=3))
    run = RunConfig(model=model_fields(), parallel=parallel_fields())
    whole = [
        (place, chunk)
        for chunk in (0, 1)
        for place in range(4)
        if plugin.ascend_activation_policy(
            config=run, has_experts=False, place=place, chunk=chunk, num_chunks=2
        )
    ]
    assert whole == [(0, 0), (1, 0), (0, 1)]


@pytest.mark.parametrize(
    ("model", "values"),
    [
        (DENSE, {**SEQUENCE, **LONGER}),
        (DENSE, {**SEQUENCE, **LONGER, "plugins.recompute.granularity": "selective"}),
        (MOE, {**LONGER, "parallel.expert_model_parallel_size": 2, "model.num_moe_experts": 16}),
    ],
    ids=["tp", "tp, feed-forwards", "ep"],
)
def test_a_step_sends_what_was_expected(
    gloo_pool: GlooPool, model: Mapping[str, Any], values: Mapping[str, Any]
) -> None:
    """What the forward sends is sent again."""
    assert differences(gloo_pool, {**model, **values}, ("recompute",)) == []


def test_legacy_flags() -> None:
    flags = [(f.flag, f.key, dict(f.where)) for f in Recompute.manifest.legacy_flags]
    per_rank = "--enable-recompute-layers-per-pp-rank"
    assert flags == [
        (per_rank, "enable", {}),
        ("--recompute-num-layers", "plugins.recompute.num_layers", {per_rank: ""}),
    ]
