"""The plugin's declarations, errors and cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pytest
from structlog.testing import capture_logs
from torch import Tensor, nn

from ascend_run.core.config.activation_policy import activation_policies
from ascend_run.core.hooks import Hooks
from ascend_run.core.model.forward_chain import install
from ascend_run.plugin_api import AscendRunError, Claim, ConfigError, HookError, Numerics
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.plugins.memory import Recomputation
from ascend_run.plugins.memory.recompute_comm_opt import RecomputeCommOpt, RecomputeCommOptConfig
from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
from ascend_run.types.forward import Forward, ForwardLink, LinkPlace, NamedLink
from tests.support.communication import differences
from tests.support.costs import planned
from tests.support.saved_tensors import expected_bytes, saved_bytes
from tests.support.small_runs import training
from tests.support.tiny_options import planned_with

NAMES: Final = ("recompute", "recompute-comm-opt")
LEVEL: Final = "plugins.recompute-comm-opt.level"
TENSORS: Final = {"parallel.tensor_model_parallel_size": 2}
SEQUENCE: Final = {**TENSORS, "parallel.sequence_parallel": True}
LONGER: Final = {"data.seq_length": 64}
MLPS: Final = {"plugins.recompute.granularity": "selective", "plugins.recompute.modules": ["mlp"]}


def test_it_claims_linear_collectives_and_changes_no_bit() -> None:
    assert claims_of(RecomputeCommOpt) == (Claim.LINEAR_COMM,)
    assert RecomputeCommOpt.manifest.numerics is Numerics.BITWISE
    assert {*planned_with("recompute-comm-opt").plan.idle} == {"recompute-comm-opt"}


@pytest.mark.parametrize("level", [0, 3])
def test_other_levels_are_refused(level: int) -> None:
    with pytest.raises(ValueError, match="level"):
        RecomputeCommOptConfig(level=level)


@pytest.mark.needs_plugins("mc2", "coc")
@pytest.mark.parametrize("other", ["mc2", "coc"])
def test_beside_another_owner_of_the_collectives_it_is_refused(other: str) -> None:
    with pytest.raises(AscendRunError, match=r"both claim 'linear-comm'"):
        planned_with(f"recompute-comm-opt,{other}")


@pytest.mark.needs_plugins("recompute")
@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"plugins.recompute.method": "uniform"}, "what Megatron recomputes itself"),
        ({"model.norm_placement": "both"}, "with model.norm_placement=both a norm of the sum"),
    ],
    ids=str,
)
def test_what_repeats_or_reads_every_sum_is_refused(values: Mapping[str, Any], told: str) -> None:
    planned({**DENSE, **values}, NAMES)  # idle without ranks that share tensors
    with pytest.raises(ConfigError, match=told):
        planned({**DENSE, **TENSORS, **values}, NAMES, 2)


def test_feed_forwards_that_megatron_recomputes_are_refused() -> None:
    values = {"model.recompute_granularity": "selective", "model.recompute_modules": ["mlp"]}
    with pytest.raises(ConfigError, match=r"recompute_granularity=selective; .* repeats every"):
        planned({**DENSE, **TENSORS, **values}, ("recompute-comm-opt",), 2)


def told(plugins: tuple[str, ...]) -> list[str]:
    """Return what the plugin says before a run. A rank's job."""
    with capture_logs() as logs, training({**DENSE, **TENSORS}, plugins) as run:
        run.hooks.event("ascend_before_run")(context=run.context)
    return [entry["changes_nothing_as"] for entry in logs if entry["event"] == "plugin.idle"]


@pytest.mark.needs_plugins("recompute")
def test_without_recomputation_it_says_that_it_changes_nothing(gloo_pool: GlooPool) -> None:
    alone = gloo_pool.run(told, 2, ("recompute-comm-opt",))
    assert alone == [["this rank recomputes no layer, nor the MLP of one without experts"]] * 2
    assert gloo_pool.run(told, 2, NAMES) == [[], []]


class Layer(nn.Module):
    """Of a layer that is recomputed whole, what its links are made from."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attention, self.mlp = nn.Module(), nn.Module()
        self.self_attention.linear_proj = self.mlp.linear_fc2 = nn.Linear(1, 1)
        self.recomputation = Recomputation()

    def forward(self, x: Tensor) -> Tensor:
        return x


def refusal_of_a_replaced_forward() -> str:
    """Return the error. A rank's job."""
    from ascend_run.plugins.memory.recompute_comm_opt.links import layer_links

    def another(inner: Forward) -> Forward:
        def own_forward(x: Tensor) -> Tensor:
            return x

        return own_forward

    layer = Layer()
    links = {
        "another": ForwardLink(wrap=another, compilable=False),
        "recompute-comm-opt": layer_links(layer, by_blocks=True)[""],
    }
    named = [NamedLink(name=n, place=LinkPlace.OWN, link=link) for n, link in links.items()]
    install(layer, {layer: named[1:]})
    try:
        install(layer, {layer: named})
    except HookError as error:
        return str(error)
    return ""


def test_a_replaced_forward_is_an_error_with_both_ways_out(gloo_pool: GlooPool) -> None:
    (error,) = gloo_pool.run(refusal_of_a_replaced_forward, 1)
    assert "'recompute-comm-opt' cannot link a forward: plugins.recompute-comm-opt.level=2" in error
    assert "the MLP of Layer.forward one by one, and another plugin has replaced it by" in error
    assert "own_forward; set plugins.recompute-comm-opt.level=1, or leave out that" in error


@pytest.mark.exhaustive(by=lambda values, level: [level, "parallel.sequence_parallel" in values])
@pytest.mark.needs_plugins("recompute")
@pytest.mark.parametrize(
    ("model", "values", "level"),
    [
        (DENSE, TENSORS, 1),
        (DENSE, {**SEQUENCE, "plugins.recompute.num_layers": 1}, 2),
        (DENSE, {**TENSORS, "parallel.pipeline_model_parallel_size": 2}, 2),
        (DENSE, {**SEQUENCE, **MLPS}, 2),
        (MOE, {**SEQUENCE, "model.num_moe_experts": 16}, 2),
    ],
    ids=["tp", "sequence", "pp", "feed-forwards", "experts"],
)
def test_a_step_sends_what_was_expected(
    gloo_pool: GlooPool, model: Mapping[str, Any], values: Mapping[str, Any], level: int
) -> None:
    config = {**model, **LONGER, **values, LEVEL: level}
    assert differences(gloo_pool, config, NAMES) == []


@pytest.mark.exhaustive(by=lambda precision: [precision] if precision == "bf16" else [])
@pytest.mark.needs_plugins("recompute")
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_by_blocks_a_layer_saves_one_hidden_state_more(gloo_pool: GlooPool, precision: str) -> None:
    batch = {"train.precision": precision, "train.global_batch_size": 2}
    wide = {"model.fp32_residual_connection": True} if precision == "bf16" else {}
    runs = [
        (NAMES, {**DENSE, **batch, **split, **more, LEVEL: level})
        for split in (TENSORS, SEQUENCE)
        for more in ({}, {"plugins.recompute.num_layers": 1}, wide)
        for level in (1, 2)
    ]

    found, _ = gloo_pool.run(saved_bytes, 2, runs)

    expected = []
    for plugins, values in runs:
        prepared, (cost,) = planned(values, plugins, 2)
        policies = activation_policies(prepared.config, Hooks(prepared.instances()))
        expected.append(expected_bytes(cost, policies))
    assert found == expected
    hidden, micro_batches, layers = 16 * 32 * (2 if precision == "bf16" else 4), 2, 2
    assert found[1] - found[0] == hidden * micro_batches * layers


def test_legacy_flags() -> None:
    flag = "--optimize-recomp-communication-level"
    assert [(f.flag, f.key, f.values) for f in RecomputeCommOpt.manifest.legacy_flags] == [
        (flag, "enable", {"1": True, "2": True}),
        (flag, LEVEL, {"1": 1, "2": 2}),
    ]
