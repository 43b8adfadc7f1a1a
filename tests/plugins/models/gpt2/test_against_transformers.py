"""Logits and every gradient against transformers, on weights saved by transformers.

The mapping of tensors is written out by hand; nothing of the implementation is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

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

HEADS, WIDTH = 4, 8
LAYOUTS = {
    name: ({"n_layer": 4, "tie_word_embeddings": tied}, ranks, layout)
    for name, (tied, ranks, layout) in DENSE_LAYOUTS.items()
}

SHAPES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "narrow-feed-forward": {"n_inner": 40},
    "another-epsilon": {"layer_norm_epsilon": 1e-2},
}


def random_gpt2(**changes: Any) -> GPT2LMHeadModel:
    """Build a model with weights unlike initial ones: no zero bias, no unit norm, logits that
    matter."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=24,
        n_embd=HEADS * WIDTH,
        n_head=HEADS,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        **{"n_layer": 2, **changes},
    )
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".ln_" in name and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.2)
    return model


def by_head(fused: Tensor) -> Tensor:
    """Reorder rows from q, k, v, each by head, to q, k, v of each head."""
    return fused.unflatten(0, (3, HEADS, WIDTH)).transpose(0, 1).flatten(0, 2)


def in_our_layout(theirs: dict[str, Tensor], config: GPT2Config) -> dict[str, Tensor]:
    """Rename its tensors to ours."""
    ours = {
        "embedding.word_embeddings.weight": theirs["transformer.wte.weight"],
        "embedding.position_embeddings.weight": theirs["transformer.wpe.weight"],
        "decoder.final_layernorm.weight": theirs["transformer.ln_f.weight"],
        "decoder.final_layernorm.bias": theirs["transformer.ln_f.bias"],
    }
    if not config.tie_word_embeddings:
        ours["output_layer.weight"] = theirs["lm_head.weight"]
    for layer in range(config.n_layer):
        at, our = f"transformer.h.{layer}", f"decoder.layers.{layer}"
        for name, their_name in (("input_layernorm", "ln_1"), ("pre_mlp_layernorm", "ln_2")):
            for part in ("weight", "bias"):
                ours[f"{our}.{name}.{part}"] = theirs[f"{at}.{their_name}.{part}"]
        qkv = f"{our}.self_attention.linear_qkv"
        ours[f"{qkv}.weight"] = by_head(theirs[f"{at}.attn.c_attn.weight"].t())
        ours[f"{qkv}.bias"] = by_head(theirs[f"{at}.attn.c_attn.bias"])
        for name, their_name in (
            ("self_attention.linear_proj", "attn.c_proj"),
            ("mlp.linear_fc1", "mlp.c_fc"),
            ("mlp.linear_fc2", "mlp.c_proj"),
        ):
            ours[f"{our}.{name}.weight"] = theirs[f"{at}.{their_name}.weight"].t()
            ours[f"{our}.{name}.bias"] = theirs[f"{at}.{their_name}.bias"]
    return ours


@pytest.fixture
def reference(request: pytest.FixtureRequest, tmp_path: Path) -> Reference:
    changes = getattr(request, "param", {})
    return Reference("gpt2", random_gpt2(**changes), tmp_path, in_our_layout)


@pytest.mark.parametrize("reference", SHAPES.values(), ids=SHAPES, indirect=True)
def test_logits_and_every_gradient_are_those_of_transformers(
    reference: Reference, gloo_pool: GlooPool
) -> None:
    check_one_rank(reference, gloo_pool)


def test_two_tensor_parallel_ranks_have_every_gradient_of_the_same_model(
    reference: Reference, gloo_pool: GlooPool
) -> None:
    """Biases are sharded with their rows, or replicated if columns are sharded."""
    check_two_ranks(reference, gloo_pool, TENSOR_PARALLEL)


@pytest.mark.parametrize(
    ("reference", "world_size", "layout"), LAYOUTS.values(), ids=LAYOUTS, indirect=["reference"]
)
def test_every_layout_loads_the_same_weights(
    reference: Reference, gloo_pool: GlooPool, world_size: int, layout: dict[str, int]
) -> None:
    check_loaded_weights(reference, gloo_pool, world_size, layout)
