"""The plugin's declarations, errors and cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ascend_run.plugin_api import ConfigError, Numerics, RunConfig
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
_SCORES = {"granularity": "selective", "modules": ("core_attn",)}
LONGER = {"data.seq_length": 64}
SEQUENCE = {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}


def problems(model: Mapping[str, Any] | None = None, **options: Any) -> list[str]:
    """With Megatron's options as the plugin sets them, or as ``model`` does."""
    plugin = Recompute(RecomputeConfig(**options))
    defaults = {key.removeprefix("model."): v for key, v in plugin.ascend_defaults().items()}
    fields = model_fields({"num_layers": 8, **defaults, **(model or {})})
    return [*plugin.ascend_check(RunConfig(model=fields, parallel=parallel_fields()))]


def test_it_claims_nothing_and_changes_no_bit() -> None:
    assert claims_of(Recompute) == ()
    assert Recompute.manifest.numerics is Numerics.BITWISE


@pytest.mark.parametrize(
    "options",
    [
        {"granularity": "some"},
        {"method": "every"},
        {"num_layers": 0},
        {"modules": ()},
        {"modules": ("moe_act",)},
        {"modules": ("mlp", "mlp")},
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(options: Mapping[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        RecomputeConfig(**options)


def test_scores_are_recomputed_in_every_layer() -> None:
    (told,) = problems(granularity="selective", modules=("core_attn", "mlp"), num_layers=1)
    assert "num_layers=1 does not go with core_attn in plugins.recompute.modules" in told


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"modules": ("mlp",)}, "recompute.modules=mlp needs plugins.recompute.granularity="),
        ({"granularity": "selective", "method": "uniform"}, "method=uniform takes whole layers"),
    ],
    ids=["modules of whole layers", "groups of modules"],
)
def test_options_without_effect_are_refused(options: Mapping[str, Any], told: str) -> None:
    (problem,) = problems(**options)
    assert told in problem


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"method": "uniform"}, {"recompute_granularity": "selective"}),
        ({"method": "uniform"}, {"recompute_method": "block"}),
        ({"method": "uniform", "num_layers": 2}, {"recompute_num_layers": 1}),
        (_SCORES, {"recompute_granularity": "full"}),
        (_SCORES, {"recompute_modules": ("mlp",)}),
    ],
    ids=str,
)
def test_an_option_of_megatron_that_says_otherwise_is_refused(
    options: Mapping[str, Any], given: Mapping[str, Any]
) -> None:
    assert problems(**options) == []
    ((name, value),) = given.items()
    (problem,) = problems(given, **options)
    shown = value if isinstance(value, str | int) else ", ".join(value)
    assert f"model.{name}={shown} is not" in problem
    assert problem.endswith(f"leave out model.{name}")


def test_options_of_megatron_that_say_the_same_go_with_it() -> None:
    same = {
        "plugins.recompute.granularity": "selective",
        "plugins.recompute.modules": ["core_attn"],
        "model.recompute_granularity": "selective",
        "model.recompute_modules": ["core_attn"],
    }
    planned({**DENSE, **same}, ("recompute",))
    with pytest.raises(ConfigError, match=r"model\.recompute_modules=mlp is not core_attn"):
        planned({**DENSE, **same, "model.recompute_modules": ["mlp"]}, ("recompute",))


@pytest.mark.parametrize("name", ["moe", "shared_experts"])
def test_modules_that_no_layer_has_are_refused(name: str) -> None:
    selective = {"plugins.recompute.granularity": "selective"}
    planned({**DENSE, **selective}, ("recompute",))
    with pytest.raises(ConfigError, match=r"recompute: .* of no layer of this model"):
        planned({**DENSE, **selective, "plugins.recompute.modules": [name]}, ("recompute",))


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
