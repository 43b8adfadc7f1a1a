"""Logits and every gradient against transformers, on weights saved by transformers.

The mapping of tensors is written out by hand; nothing of the implementation is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ascend_run.testing.pool import GlooPool
from tests.support.against_transformers import (
    DENSE_LAYOUTS,
    TENSOR_PARALLEL,
    VOCAB,
    Reference,
    check_loaded_weights,
    check_one_rank,
    check_two_ranks,
)

HEADS = 4
SHAPES = {
    "grouped": {},
    "one-group": {"num_key_value_heads": 1},
    "every-head-its-own": {"num_key_value_heads": 4},
    "wide-heads": {"head_dim": 12},
    "tied": {"tie_word_embeddings": True},
    "another-base": {
        "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
        "rms_norm_eps": 1e-2,
    },
}
LAYOUTS = {
    name: ({"num_hidden_layers": 4, "tie_word_embeddings": tied}, ranks, layout)
    for name, (tied, ranks, layout) in DENSE_LAYOUTS.items()
}


def random_llama(**changes: Any) -> LlamaForCausalLM:
    """Build a model with weights unlike initial ones: norms of different values, logits that
    matter."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=40,
        num_attention_heads=HEADS,
        initializer_range=0.2,
        **{"num_hidden_layers": 2, "max_position_embeddings": 64, **changes},
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def in_our_layout(theirs: dict[str, Tensor], config: LlamaConfig) -> dict[str, Tensor]:
    """Rename its tensors to ours, fused head by head."""
    ours = {
        "embedding.word_embeddings.weight": theirs["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": theirs["model.norm.weight"],
    }
    if not config.tie_word_embeddings:
        ours["output_layer.weight"] = theirs["lm_head.weight"]
    for layer in range(config.num_hidden_layers):
        at, our = f"model.layers.{layer}", f"decoder.layers.{layer}"
        rows = []
        for group in range(config.num_key_value_heads):
            per_group = HEADS // config.num_key_value_heads
            q, k, v = (
                theirs[f"{at}.self_attn.{part}_proj.weight"].split(config.head_dim)
                for part in "qkv"
            )
            rows += [q[group * per_group + head] for head in range(per_group)]
            rows += [k[group], v[group]]
        ours[f"{our}.self_attention.linear_qkv.weight"] = torch.cat(rows)
        ours[f"{our}.self_attention.linear_proj.weight"] = theirs[f"{at}.self_attn.o_proj.weight"]
        ours[f"{our}.input_layernorm.weight"] = theirs[f"{at}.input_layernorm.weight"]
        ours[f"{our}.pre_mlp_layernorm.weight"] = theirs[f"{at}.post_attention_layernorm.weight"]
        ours[f"{our}.mlp.linear_fc1.weight"] = torch.cat(
            [theirs[f"{at}.mlp.gate_proj.weight"], theirs[f"{at}.mlp.up_proj.weight"]]
        )
        ours[f"{our}.mlp.linear_fc2.weight"] = theirs[f"{at}.mlp.down_proj.weight"]
    return ours


@pytest.fixture
def reference(request: pytest.FixtureRequest, tmp_path: Path) -> Reference:
    changes = {"num_key_value_heads": 2, **getattr(request, "param", {})}
    return Reference("llama", random_llama(**changes), tmp_path, in_our_layout)


@pytest.mark.parametrize("reference", SHAPES.values(), ids=SHAPES, indirect=True)
def test_logits_and_every_gradient_are_those_of_transformers(
    reference: Reference, gloo_pool: GlooPool
) -> None:
    check_one_rank(reference, gloo_pool)


def test_two_tensor_parallel_ranks_have_every_gradient_of_the_same_model(
    reference: Reference, gloo_pool: GlooPool
) -> None:
    check_two_ranks(reference, gloo_pool, TENSOR_PARALLEL)


@pytest.mark.parametrize(
    ("reference", "world_size", "layout"), LAYOUTS.values(), ids=LAYOUTS, indirect=["reference"]
)
def test_every_layout_loads_the_same_weights(
    reference: Reference, gloo_pool: GlooPool, world_size: int, layout: dict[str, int]
) -> None:
    check_loaded_weights(reference, gloo_pool, world_size, layout)
