"""What the options of the model cost: parameters and FLOPs exactly, memory within five percent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
from ascend_run.tools.plan.cost_model.flops import attention_flops
from ascend_run.tools.plan.cost_model.names import parameter_key
from ascend_run.tools.plan.cost_model.sizes import sizes_of
from benchmarks.memory_case import Case
from benchmarks.memory_prediction import TOLERANCE, compare, is_exact
from tests.support.costs import planned

from .cost_jobs import built_and_counted

WIDE = {
    "model.num_layers": 4,
    "model.hidden_size": 64,
    "model.ffn_hidden_size": 176,
    "data.seq_length": 128,
    "train.micro_batch_size": 4,
    "train.global_batch_size": 4,
}
BOTH = {"model.norm_placement": "both", "model.residual_multiplier": 0.5}
SWITCHES: dict[str, Mapping[str, Any]] = {
    "bias of the projection": {**DENSE, "model.add_linear_proj_bias": True},
    "biases of the mlp": {**DENSE, "model.add_mlp_bias": True},
    "all but the mlp's": {**DENSE, "model.add_bias_linear": True, "model.add_mlp_bias": False},
    "norms on both sides": {**DENSE, **BOTH},
    "norms of outputs": {**DENSE, "model.norm_placement": "post"},
    "norms of experts' outputs": {**MOE, **BOTH},
    "norm of embeddings": {**DENSE, "model.embedding_layernorm": True},
    "biases of experts": {**MOE, "model.add_router_bias": True, "model.add_expert_bias": True},
    "bias of logits": {**DENSE, "model.add_output_bias": True},
    "sinks": {**DENSE, "model.softmax_type": "learnable"},
    "LayerNorm": {**DENSE, **BOTH, "model.normalization": "LayerNorm"},
    "multi-token prediction": {**DENSE, "model.mtp_num_layers": 2},
    "multi-token prediction with experts": {**MOE, "model.mtp_num_layers": 1},
}


@pytest.mark.exhaustive(by=lambda values: [values["model.family"]])
@pytest.mark.parametrize("values", SWITCHES.values(), ids=SWITCHES)
def test_every_parameter_is_counted_under_its_name(
    gloo_pool: GlooPool, values: Mapping[str, Any]
) -> None:
    ((names, counted),) = gloo_pool.run(built_and_counted, 1, dict(values))
    assert Counter(map(parameter_key, {*names})) == counted


@pytest.mark.parametrize(
    "values",
    [
        {"model.add_linear_proj_bias": True, "model.add_mlp_bias": True},
        BOTH,
        {"model.norm_placement": "post", "model.logits_scaling": 2.0},
        {"model.final_logit_softcapping": 5.0, "model.scale_embedding": True},
        {"model.mtp_num_layers": 1},
    ],
    ids=["biases", "norms on both sides", "norms of outputs", "factors", "multi-token prediction"],
)
def test_a_run_takes_the_memory_that_was_expected(
    gloo_pool: GlooPool, values: dict[str, Any]
) -> None:
    for row in compare(Case(name="switches", values={**DENSE, **WIDE, **values}), gloo_pool):
        assert is_exact(row), row
        assert abs(row["off"]) <= TOLERANCE, row


_TP = {"parallel.tensor_model_parallel_size": 2}


@pytest.mark.exhaustive(by=lambda values: values)
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"train.precision": "bf16"},
        {"train.precision": "bf16", "model.final_logit_softcapping": 5.0},
        {"model.add_output_bias": True},
        {"train.precision": "bf16", **_TP},
        {**_TP, "parallel.sequence_parallel": True},
    ],
    ids=["fp32", "bf16", "softcap", "bias", "tp", "sequence parallel"],
)
def test_smaller_chunks_of_logits_save_what_was_expected(
    gloo_pool: GlooPool, values: dict[str, Any]
) -> None:
    """Logits of 512 tokens, eight times the weight of the output layer, are the peak; a chunk is
    not."""
    ranks = values.get("parallel.tensor_model_parallel_size", 1)
    logits = 512 * 8192 // ranks * (2 if values.get("train.precision") == "bf16" else 4)
    peaks = []
    for chunk in (2**26, 2**17):
        given = {**DENSE, **WIDE, "model.vocab_size": 8192, "train.loss_chunk_bytes": chunk}
        rows = compare(Case(name="chunks", ranks=ranks, values={**given, **values}), gloo_pool)
        assert all(abs(row["off"]) <= TOLERANCE for row in rows), rows
        peaks.append(rows[0]["peak"])
    (expected, measured), (less, least) = peaks
    assert measured - least >= logits / 2
    assert expected - less == pytest.approx(measured - least, rel=TOLERANCE)


_FP16 = {"train.precision": "fp16", "optimizer.loss_scale": 2.0, "model.mtp_num_layers": None}
LOSSES: dict[str, Mapping[str, Any]] = {
    "rows": {"data.seq_length": 128, "train.micro_batch_size": 4, "train.global_batch_size": 4},
    "padding": {"model.vocab_size": 8130},
    "tied": {"model.share_embeddings_and_output_weights": True},
    "two depths": {"model.mtp_num_layers": 2},
    "micro-batches": {"train.global_batch_size": 2},
    "one in fp16": _FP16,
    "one in fp16 and one chunk": {**_FP16, "train.loss_chunk_bytes": 2**26},
}


@pytest.mark.parametrize("values", LOSSES.values(), ids=LOSSES)
def test_losses_hold_gradients_until_their_backward(
    gloo_pool: GlooPool, values: Mapping[str, Any]
) -> None:
    """The weight of the output layer is larger than all others, and all but the first case's
    activations: each of its gradients shows."""
    short = {"data.seq_length": 32, "train.micro_batch_size": 1, "train.global_batch_size": 1}
    large = {"model.vocab_size": 8192, "train.loss_chunk_bytes": 2**17, "model.mtp_num_layers": 1}
    case = Case(name="losses", values={**DENSE, **WIDE, **short, **large, **values})
    (row,) = compare(case, gloo_pool)
    assert is_exact(row), row
    assert abs(row["off"]) <= 0.005, row


@pytest.mark.parametrize("tied", [False, True], ids=["two tables", "tied"])
def test_gradients_are_copied_to_float32_one_after_the_other(
    gloo_pool: GlooPool, tied: bool
) -> None:
    """The tables are nearly all of the model. Of two, the first one's bf16 gradient is freed before
    the second one is copied."""
    short = {"data.seq_length": 16, "train.micro_batch_size": 1, "train.global_batch_size": 1}
    large = {"model.vocab_size": 16384, "train.loss_chunk_bytes": 2**17}
    given = {"train.precision": "bf16", "model.share_embeddings_and_output_weights": tied}
    (row,) = compare(Case(name="u", values={**DENSE, **WIDE, **short, **large, **given}), gloo_pool)
    assert row["moment"] == "update"
    assert is_exact(row), row
    assert abs(row["off"]) <= 0.005, row


LOCAL = {
    "model.rotary_local_base": 100.0,
    "model.window_size": [16, 0],
    "model.window_attn_skip_freq": 2,
}


@pytest.mark.parametrize(
    "values", [{"model.embedding_layernorm": True}, LOCAL], ids=["norm of embeddings", "two tables"]
)
def test_what_a_switch_adds_to_the_peak_is_expected_to_the_byte(
    gloo_pool: GlooPool, values: dict[str, Any]
) -> None:
    without = {**LOCAL, "model.rotary_local_base": None}
    peaks = []
    for given in (without, {**without, **values}):
        case = Case(name="switch", values={**DENSE, **WIDE, "data.seq_length": 256, **given})
        (row,) = compare(case, gloo_pool)
        peaks.append(row["peak"])
    (expected, measured), (more, most) = peaks
    assert more > expected
    assert more - expected == pytest.approx(most - measured, abs=64)


CLAMPED = {
    "model.activation": "quick_gelu",
    "model.activation_func_clamp_value": 7.0,
    "model.glu_linear_offset": 1.0,
}


@pytest.mark.parametrize(
    "model", [DENSE, {**MOE, "model.add_expert_bias": True}], ids=["mlp", "experts"]
)
def test_a_clamped_activation_takes_the_memory_that_was_expected(
    gloo_pool: GlooPool, model: Mapping[str, Any]
) -> None:
    (row,) = compare(Case(name="clamped", values={**model, **WIDE, **CLAMPED}), gloo_pool)
    assert is_exact(row), row
    assert abs(row["off"]) <= TOLERANCE, row


@pytest.mark.exhaustive(by=lambda norms: ["norms"] if norms else [])
@pytest.mark.parametrize("norms", [False, True])
def test_ranks_that_share_key_value_heads_take_what_was_expected(
    gloo_pool: GlooPool, norms: bool
) -> None:
    four = {"parallel.tensor_model_parallel_size": 4, "parallel.sequence_parallel": True}
    values = {**DENSE, **WIDE, **four, "model.qk_layernorm": norms, "model.num_query_groups": 1}
    rows = compare(Case(name="shared", ranks=4, values=values), gloo_pool)
    assert all(is_exact(row) and abs(row["off"]) <= TOLERANCE for row in rows), rows


def test_only_layers_with_a_window_attend_to_fewer_keys() -> None:
    """16 queries see 8.5 keys on average; with 3 keys before each, (1 + 2 + 3 + 13 * 4) / 16."""
    values = {**DENSE, "model.window_size": [3, 0], "model.window_attn_skip_freq": 2}
    prepared, (cost,) = planned(values)
    sizes = sizes_of(prepared.config, prepared.layout)
    windowed, full = (attention_flops(prepared.config, sizes, layer) for layer in (0, 1))
    assert windowed / full == (58 / 16) / 8.5
    _, (plain,) = planned(DENSE)
    passes = DENSE["train.global_batch_size"]
    assert plain.attention_flops - cost.attention_flops == 3.5 * passes * (full - windowed)
