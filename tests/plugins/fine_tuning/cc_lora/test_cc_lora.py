"""The plugin's declarations, errors, cost and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from ascend_run.plugin_api import AscendRunError, Claim, ConfigError, Numerics
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.plugins.fine_tuning.cc_lora import CcLora, CcLoraOptions
from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
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
from tests.support.latent_models import MODEL as LATENT
from tests.support.saved_tensors import saved_bytes
from tests.support.tiny_options import planned_with

NAMES: Final = ("lora", "cc-lora")


def test_it_claims_the_collectives_of_linears_and_is_idle_without_any() -> None:
    assert claims_of(CcLora) == (Claim.LINEAR_COMM,)
    assert CcLora.manifest.numerics is Numerics.ROUNDING
    assert {*planned_with("lora,cc-lora").plan.idle} == {"cc-lora"}
    split = ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true")
    assert planned_with("lora,cc-lora", *split, ranks=2).plan.idle == {}


def test_without_lora_it_is_refused_with_what_to_do() -> None:
    with pytest.raises(AscendRunError, match=r"'cc-lora' requires 'lora'; add it"):
        planned_with("cc-lora")


@pytest.mark.needs_plugins("mc2", "coc")
@pytest.mark.parametrize("other", ["mc2", "coc"])
def test_beside_another_owner_of_the_collectives_it_is_refused(other: str) -> None:
    with pytest.raises(AscendRunError, match=r"both claim 'linear-comm'"):
        planned_with(f"lora,cc-lora,{other}")


def test_options_have_bounds() -> None:
    with pytest.raises(ValueError, match="slices"):
        CcLoraOptions(slices=0)


def test_an_adapter_with_dropout_cannot_be_merged() -> None:
    values = {**DENSE, "plugins.lora.dropout": 0.1}
    planned(values, NAMES)
    wanted = r"merge=true with plugins.lora.dropout=0.1: .*; set plugins.lora.dropout=0, or leave"
    with pytest.raises(ConfigError, match=wanted):
        planned({**values, "plugins.cc-lora.merge": True}, NAMES)


def test_decomposed_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"plugins.lora.dora=true scales the sum"):
        planned({**DENSE, "plugins.lora.dora": True}, NAMES)


def test_legacy_flags() -> None:
    assert [(f.flag, f.key) for f in CcLora.manifest.legacy_flags] == [("--lora-fusion", "enable")]


@pytest.mark.exhaustive(by=lambda model: [len(model)])
@pytest.mark.parametrize(
    ("model", "values"),
    [
        (DENSE, SEQUENCE),
        (DENSE, {**TENSORS, "plugins.cc-lora.slices": 3}),
        (DENSE, {**SEQUENCE, "plugins.cc-lora.slices": 1, **RECOMPUTED}),
        (DENSE, {**SEQUENCE, "plugins.cc-lora.merge": True}),
        (DENSE, {**SEQUENCE, "plugins.lora.target_modules": ["linear_q", "linear_fc2"]}),
        (LATENT, {**SEQUENCE, "model.num_moe_experts": 16}),
        (MOE, {**SEQUENCE, "model.num_moe_experts": 16}),
        ({**DENSE, "parallel.tensor_model_parallel_size": 4}, {"parallel.sequence_parallel": True}),
    ],
    ids=["sequence", "tensors", "recomputed", "merged", "some", "latents", "experts", "four ranks"],
)
def test_a_step_sends_what_was_expected(
    gloo_pool: GlooPool, model: Mapping[str, Any], values: Mapping[str, Any]
) -> None:
    config = {**model, **LONGER, **values, "plugins.lora.export": False}
    assert differences(gloo_pool, config, NAMES) == []


@pytest.mark.parametrize("values", [TENSORS, SEQUENCE], ids=["tensors", "sequence"])
def test_plan_expects_a_quarter_less_exposed_communication(values: Mapping[str, Any]) -> None:
    alone = exposed_bytes(("lora",), values)
    assert exposed_bytes(NAMES, values) <= 0.75 * alone
    unsliced = exposed_bytes(NAMES, {**values, "plugins.cc-lora.slices": 1})
    assert exposed_bytes(NAMES, values) < unsliced < alone  # adapters' own are overlapped


@pytest.mark.exhaustive(by=lambda values: ())
@pytest.mark.parametrize("values", [TENSORS, SEQUENCE], ids=["tensors", "sequence"])
def test_it_saves_no_more_activations_than_lora(
    gloo_pool: GlooPool, values: Mapping[str, Any]
) -> None:
    config = {**DENSE, **values, "plugins.lora.export": False}
    long = {**config, **LONGER}
    merged = {**long, "plugins.cc-lora.merge": True}
    runs = [(("lora",), config), (NAMES, config), (("lora",), long), (NAMES, merged)]
    alone, ours, longer, local = gloo_pool.run(saved_bytes, 2, runs)[0]
    assert ours == alone
    # Merged, with sequence parallelism a column-parallel linear saves the output of A of its own
    # rows: qkv has three parts of rank 8, and fc1 two; two layers, four micro-batches, float32.
    halved = 64 * 5 * 8 // 2 * 4 if "parallel.sequence_parallel" in values else 0
    assert longer - local == 2 * 4 * halved


def test_a_resumed_run_changes_no_bit_and_has_the_keys_of_lora(
    gloo_pool: GlooPool, tmp_path: Path
) -> None:
    assert_resumed_without_change(gloo_pool, NAMES, SEQUENCE, tmp_path)
