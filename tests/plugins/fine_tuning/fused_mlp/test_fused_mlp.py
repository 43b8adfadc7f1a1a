"""The plugin's declarations, errors, cost and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from ascend_run.core.config.activation_policy import activation_policies
from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import AscendRunError, ConfigError, Numerics
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.plugins.fine_tuning.fused_mlp import FusedMlp
from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
from tests.core.train.runs import Ended, whole_run
from tests.plugins.fine_tuning.adapter_plans import (
    LONGER,
    RECOMPUTED,
    SEQUENCE,
    TENSORS,
    exposed_bytes,
)
from tests.plugins.fine_tuning.adapter_trials import assert_resumed_without_change
from tests.support.communication import differences
from tests.support.costs import planned
from tests.support.preference_files import assert_equal_steps, write_models_and_pairs
from tests.support.saved_tensors import expected_bytes, saved_bytes
from tests.support.task_runs import run_values
from tests.support.tiny_options import planned_with

NAMES: Final = ("lora", "fused-mlp")
MIXED: Final = {**MOE, "model.moe_layer_freq": [0, 1]}
"""A dense layer before one with experts."""


def test_it_claims_nothing_and_rounds() -> None:
    assert claims_of(FusedMlp) == ()
    assert FusedMlp.manifest.numerics is Numerics.ROUNDING
    assert planned_with("lora,fused-mlp").plan.idle == {}


def test_without_lora_it_is_refused_with_what_to_do() -> None:
    with pytest.raises(AscendRunError, match=r"'fused-mlp' requires 'lora'; add it"):
        planned_with("fused-mlp")


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ("recompute-activation", "it already recomputes the activation in backward"),
        ("coc", "it computes the linears of MLPs itself, without the collectives of coc"),
        ("mc2", "it computes the linears of MLPs itself, without the collectives of mc2"),
        ("recompute-comm-opt", "without the collectives of recompute-comm-opt; leave out"),
    ],
)
@pytest.mark.needs_plugins("recompute-activation", "coc", "mc2", "recompute-comm-opt")
def test_beside_what_excludes_it_it_is_refused(other: str, why: str) -> None:
    with pytest.raises(AscendRunError) as refusal:
        planned_with(f"lora,fused-mlp,{other}")
    assert "fused-mlp" in str(refusal.value)
    assert why in str(refusal.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"plugins.lora.target_modules": ["linear_qkv", "linear_fc1_up"]},
            "=linear_qkv,linear_fc1_up leaves linear_fc2 without an adapter; expected linear_fc1",
        ),
        (
            {"plugins.lora.target_modules": ["linear_proj"]},
            "leaves linear_fc1 and linear_fc2 without an adapter",
        ),
        ({"plugins.lora.dora": True}, "fused-mlp: plugins.lora.dora=true scales the sum"),
        ({"model.gated_linear_unit": False}, "set model.gated_linear_unit=true, or leave fused"),
    ],
)
def test_a_run_that_it_cannot_serve_is_refused(values: Mapping[str, Any], message: str) -> None:
    planned(DENSE, NAMES)
    with pytest.raises(AscendRunError) as refusal:
        planned({**DENSE, **values}, NAMES)
    assert message in str(refusal.value)


def test_a_model_of_experts_alone_is_refused_one_dense_layer_is_enough() -> None:
    with pytest.raises(ConfigError, match=r"every layer has experts .*; leave fused-mlp out"):
        planned(MOE, NAMES)
    planned(MIXED, NAMES)


def test_legacy_flags() -> None:
    flags = [(f.flag, f.key) for f in FusedMlp.manifest.legacy_flags]
    assert flags == [("--use-fused-mlp", "enable")]


@pytest.mark.exhaustive(by=lambda model, values, beside: [len(model), *values, beside])
@pytest.mark.parametrize("beside", [(), ("cc-lora",)], ids=["alone", "cc-lora"])
@pytest.mark.parametrize(
    ("model", "values"),
    [
        (DENSE, SEQUENCE),
        (DENSE, TENSORS),
        (DENSE, {**SEQUENCE, **RECOMPUTED}),
        (MIXED, {**SEQUENCE, "model.num_moe_experts": 16}),
    ],
    ids=["sequence", "tensors", "recomputed", "experts"],
)
@pytest.mark.needs_plugins("cc-lora")
def test_a_step_sends_what_was_expected(
    gloo_pool: GlooPool,
    model: Mapping[str, Any],
    values: Mapping[str, Any],
    beside: tuple[str, ...],
) -> None:
    config = {**model, **LONGER, **values, "plugins.lora.export": False}
    assert differences(gloo_pool, config, (*NAMES, *beside)) == []


@pytest.mark.parametrize("values", [TENSORS, SEQUENCE], ids=["tensors", "sequence"])
@pytest.mark.needs_plugins("cc-lora")
def test_plan_expects_less_exposed_communication(values: Mapping[str, Any]) -> None:
    """Beside cc-lora there is nothing left to overlap."""
    assert exposed_bytes(NAMES, values) < exposed_bytes(("lora",), values)
    both = exposed_bytes((*NAMES, "cc-lora"), values)
    assert both == exposed_bytes(("lora", "cc-lora"), values)


@pytest.mark.exhaustive(by=lambda values, beside: [*values, beside])
@pytest.mark.parametrize("beside", [(), ("cc-lora",), ("swiglu",)], ids=str)
@pytest.mark.parametrize(
    ("values", "ranks"), [({}, 1), (TENSORS, 2), (SEQUENCE, 2)], ids=["one", "tensors", "sequence"]
)
@pytest.mark.needs_plugins("cc-lora", "swiglu")
def test_half_of_an_mlps_activations_are_not_saved(
    gloo_pool: GlooPool, values: Mapping[str, Any], ranks: int, beside: tuple[str, ...]
) -> None:
    """Of each token and layer two numbers of the MLP's width, as a plan expects."""
    config = {**DENSE, **values, "plugins.lora.export": False}
    runs = [((*plugins, *beside), config) for plugins in (("lora",), NAMES)]
    alone, ours = gloo_pool.run(saved_bytes, ranks, runs)[0]
    layers, micro_batches, tokens, width, item = 2, 4, 16, 48 // ranks, 4
    assert alone - ours == layers * micro_batches * tokens * 2 * width * item
    (before, after) = (expected(config, plugins, ranks) for plugins, _ in runs)
    assert before - after == alone - ours


def expected(config: Mapping[str, Any], plugins: tuple[str, ...], ranks: int) -> float:
    prepared, (cost,) = planned(config, plugins, ranks)
    return expected_bytes(cost, activation_policies(prepared.config, Hooks(prepared.instances())))


def test_a_resumed_run_changes_no_bit_and_has_the_keys_of_lora(
    gloo_pool: GlooPool, tmp_path: Path
) -> None:
    assert_resumed_without_change(gloo_pool, NAMES, SEQUENCE, tmp_path)


@pytest.mark.needs_plugins("dpo")
def test_a_reference_of_the_base_has_no_adapters(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """After the first step adapters are not zero, and the margins show what the reference has."""
    folder = write_models_and_pairs(tmp_path, 8)
    options = {
        "data__seq_length": 128,
        "train__train_iters": 3,
        "train__global_batch_size": 2,
        "train__log_interval": 1,
        "plugins__dpo__packing": False,
        "plugins__dpo__reference": "base",
        "plugins__lora__export": False,
    }

    def run(name: str, plugins: tuple[str, ...]) -> Ended:
        values = run_values("dpo", folder, tmp_path / name, **options)
        (ended,) = gloo_pool.run(whole_run, 1, values, plugins, timeout=100)
        return ended

    alone, ours = run("lora", ("lora",)), run("fused", NAMES)
    assert_equal_steps(ours.readings, [line for line in alone.readings if "loss" in line])
    assert alone.readings[-1]["rewards/margins"] != 0.0
