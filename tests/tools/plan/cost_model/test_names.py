"""Every parameter of a built model goes by the key under which ``plan`` counts it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
from ascend_run.tools.plan.cost_model.names import parameter_key

from .cost_jobs import built_and_counted

BIASES = {
    **DENSE,
    "model.normalization": "LayerNorm",
    "model.add_bias_linear": True,
    "model.qk_layernorm": True,
    "model.position_embedding_type": "learned_absolute",
    "model.share_embeddings_and_output_weights": True,
}
SHARED = {
    **MOE,
    "model.moe_shared_expert_intermediate_size": 24,
    "model.add_qkv_bias": True,
}


@pytest.mark.parametrize(
    "values", [DENSE, BIASES, MOE, SHARED], ids=["dense", "biases", "experts", "shared experts"]
)
def test_names_have_the_keys_of_what_is_counted(
    gloo_pool: GlooPool, values: Mapping[str, Any]
) -> None:
    ((names, counted),) = gloo_pool.run(built_and_counted, 1, dict(values))
    keys = {name: parameter_key(name) for name in names}
    assert None not in keys.values(), keys
    assert Counter(keys.values()) == counted


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.0.mlp.linear_fc1.adapter.lora_A.weight",
        "decoder.layers.0.self_attention.linear_qkv.scale",
        "value_head.weight",
        "decoder.layers.0.mlp.experts.gate",
    ],
)
def test_what_the_plain_model_does_not_have_has_no_key(name: str) -> None:
    assert parameter_key(name) is None
