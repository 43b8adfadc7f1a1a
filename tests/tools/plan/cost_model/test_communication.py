"""Calls and bytes of a step in every group, against those that the kit counts on four ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ascend_run.testing.models import MODELS
from ascend_run.testing.pool import GlooPool
from tests.support.communication import differences

_TP = {"parallel.tensor_model_parallel_size": 2}
_SP = {**_TP, "parallel.sequence_parallel": True}
_EP = {"parallel.expert_model_parallel_size": 2}
_PP = {"parallel.pipeline_model_parallel_size": 2}
_VPP = {**_PP, "parallel.virtual_pipeline_model_parallel_size": 2, "model.num_layers": 4}
_CP = {"parallel.context_parallel_size": 2}
_TIED = {"model.share_embeddings_and_output_weights": True}
_WIDE_STREAM = {"train.precision": "bf16", "model.fp32_residual_connection": True}
_SPREAD = {"ddp.use_distributed_optimizer": True}
_BUCKETS = {"ddp.overlap_grad_reduce": True, "ddp.bucket_size": 4000}
_LEARNED = {
    "model.position_embedding_type": "learned_absolute",
    "model.normalization": "LayerNorm",
    "model.add_bias_linear": True,
}
_SHARED = {"model.moe_shared_expert_intermediate_size": 48}
_MTP = {"model.mtp_num_layers": 2}
_REPEATED = {
    "model.recompute_granularity": "full",
    "model.recompute_method": "uniform",
    "model.recompute_num_layers": 1,
}
_LONGER = {
    "dense": {"data.seq_length": 64},
    "moe": {"data.seq_length": 64, "model.num_moe_experts": 16},
}
"""So that what is counted is more than a few numbers."""


@pytest.mark.exhaustive(by=lambda values: {*values} & {*_VPP, *_SPREAD, *_CP, *_EP})
@pytest.mark.parametrize(
    ("model", "values"),
    [
        pytest.param("dense", {**_TP, **_PP, **_TIED}, id="tp-pp-embd"),
        pytest.param("dense", {**_SP, **_PP, **_WIDE_STREAM}, id="tp-pp-wide-residual-stream"),
        pytest.param(
            "dense",
            {"parallel.tensor_model_parallel_size": 4, "parallel.sequence_parallel": True},
            id="tp-shared-key-value-heads",
        ),
        pytest.param("dense", {**_SP, **_REPEATED}, id="tp-sequence-dp-recomputed"),
        pytest.param("dense", {**_SP, **_LEARNED}, id="tp-sequence-learned-positions"),
        pytest.param("dense", {**_VPP, **_TIED, **_SPREAD}, id="vpp-dp-spread-embd"),
        pytest.param("dense", {**_PP, **_BUCKETS}, id="pp-dp-in-buckets"),
        pytest.param("dense", {**_SPREAD, **_BUCKETS}, id="dp-spread-in-buckets"),
        pytest.param(
            "dense",
            {**_CP, **_TP, "enable": ("ulysses",)},
            id="cp-tp",
            marks=pytest.mark.needs_plugins("ulysses"),
        ),
        pytest.param("dense", {**_SP, **_PP, **_MTP}, id="tp-pp-mtp"),
        pytest.param("dense", {**_TP, **_TIED, **_SPREAD, **_MTP}, id="tp-dp-spread-tied-mtp"),
        pytest.param(
            "dense",
            {**_CP, **_PP, **_MTP, "enable": ("ulysses",)},
            id="cp-pp-mtp",
            marks=pytest.mark.needs_plugins("ulysses"),
        ),
        pytest.param("moe", {**_EP, **_SPREAD}, id="ep-dp-spread"),
        pytest.param("moe", {**_SP, **_EP, **_SHARED}, id="ep-tp-shared-experts"),
    ],
)
def test_a_step_sends_what_was_expected(
    gloo_pool: GlooPool, model: str, values: Mapping[str, Any]
) -> None:
    config = {**MODELS[model], **_LONGER[model], **values}
    plugins = config.pop("enable", ())

    assert differences(gloo_pool, config, plugins) == []


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({**_EP, **_REPEATED}, id="layers"),
        pytest.param(
            {
                **_EP,
                "model.recompute_granularity": "selective",
                "model.recompute_modules": ["moe"],
            },
            id="experts",
        ),
    ],
)
def test_a_step_sends_tokens_again_for_what_is_recomputed(
    gloo_pool: GlooPool, values: Mapping[str, Any]
) -> None:
    assert differences(gloo_pool, {**MODELS["moe"], **_LONGER["moe"], **values}, ()) == []


@pytest.mark.exhaustive(by=lambda plugin: [] if plugin == "kv-allgather-cp" else [plugin])
@pytest.mark.parametrize(
    ("plugin", "values"),
    [
        pytest.param(name, values, id=name, marks=pytest.mark.needs_plugins(name))
        for name, values in (
            ("ulysses", _CP),
            ("kv-allgather-cp", _CP),
            ("lora", _SP),
        )
    ],
)
def test_a_plugin_sends_again_for_what_is_recomputed(
    gloo_pool: GlooPool, plugin: str, values: Mapping[str, Any]
) -> None:
    config = {**MODELS["dense"], **_LONGER["dense"], **values, **_REPEATED}
    assert differences(gloo_pool, config, (plugin,)) == []
