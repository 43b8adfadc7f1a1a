"""Logits and every gradient against transformers, on weights saved by transformers.

The mapping of tensors is written out by hand; nothing of the implementation is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

from ascend_run.testing.pool import GlooPool
from tests.support.against_transformers import (
    EXPERT_TENSOR,
    EXPERTS,
    STAGES,
    TENSOR,
    VIRTUAL_STAGES,
    VOCAB,
    Reference,
    check_loaded_weights,
    check_one_rank,
    check_two_ranks,
)

HEADS, GROUPS, WIDTH = 4, 2, 8
SHAPES = {
    f"{experts} experts, {chosen} to a token": {
        "num_local_experts": experts,
        "num_experts_per_tok": chosen,
    }
    for experts, chosen in ((4, 2), (6, 3), (2, 2))
}
LAYOUTS = {
    "ep": ({}, 2, EXPERTS),
    "tp, experts whole": ({}, 2, {**TENSOR, **EXPERTS}),
    "expert tp": ({}, 2, {**TENSOR, **EXPERT_TENSOR}),
    "expert tp ep": ({}, 4, {**TENSOR, **EXPERT_TENSOR, **EXPERTS}),
    "pp ep": ({}, 4, {**STAGES, **EXPERTS}),
    "vpp": ({"num_hidden_layers": 4}, 2, VIRTUAL_STAGES),
}


def random_mixtral(**changes: Any) -> MixtralForCausalLM:
    """Build a model with weights unlike initial ones: norms of different values, logits that
    matter.

    Without the auxiliary loss, which is Megatron's own in our runs.
    """
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=HEADS * WIDTH,
        intermediate_size=24,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        max_position_embeddings=64,
        initializer_range=0.2,
        router_aux_loss_coef=0.0,
        **{"num_hidden_layers": 2, **changes},
    )
    model = MixtralForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def in_our_layout(theirs: dict[str, Tensor], config: MixtralConfig) -> dict[str, Tensor]:
    """Rename its tensors to ours; in memory transformers stacks its experts as we do."""
    ours = {
        "embedding.word_embeddings.weight": theirs["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": theirs["model.norm.weight"],
        "output_layer.weight": theirs["lm_head.weight"],
    }
    for layer in range(config.num_hidden_layers):
        at, our = f"model.layers.{layer}", f"decoder.layers.{layer}"
        rows = []
        q, k, v = (theirs[f"{at}.self_attn.{part}_proj.weight"].split(WIDTH) for part in "qkv")
        for group in range(GROUPS):
            per_group = HEADS // GROUPS
            rows += [q[group * per_group + head] for head in range(per_group)]
            rows += [k[group], v[group]]
        ours[f"{our}.self_attention.linear_qkv.weight"] = torch.cat(rows)
        ours[f"{our}.self_attention.linear_proj.weight"] = theirs[f"{at}.self_attn.o_proj.weight"]
        ours[f"{our}.input_layernorm.weight"] = theirs[f"{at}.input_layernorm.weight"]
        ours[f"{our}.pre_mlp_layernorm.weight"] = theirs[f"{at}.post_attention_layernorm.weight"]
        ours[f"{our}.mlp.router.weight"] = theirs[f"{at}.mlp.gate.weight"]
        ours[f"{our}.mlp.experts.fc1"] = theirs[f"{at}.mlp.experts.gate_up_proj"]
        ours[f"{our}.mlp.experts.fc2"] = theirs[f"{at}.mlp.experts.down_proj"]
    return ours


@pytest.fixture
def reference(request: pytest.FixtureRequest, tmp_path: Path) -> Reference:
    changes = {"num_local_experts": 4, **getattr(request, "param", {})}
    return Reference("mixtral", random_mixtral(**changes), tmp_path, in_our_layout)


@pytest.mark.parametrize("reference", SHAPES.values(), ids=SHAPES, indirect=True)
def test_logits_and_every_gradient_are_those_of_transformers(
    reference: Reference, gloo_pool: GlooPool
) -> None:
    check_one_rank(reference, gloo_pool)


def test_two_expert_parallel_ranks_have_every_gradient_of_the_same_model(
    reference: Reference, gloo_pool: GlooPool
) -> None:
    """Both ranks see the same batch, so an expert accumulates the gradients of both: twice
    one's."""
    check_two_ranks(
        reference,
        gloo_pool,
        ["parallel.expert_model_parallel_size=2"],
        times=lambda name: 2 if ".experts." in name else 1,
    )


@pytest.mark.parametrize(
    ("reference", "world_size", "layout"), LAYOUTS.values(), ids=LAYOUTS, indirect=["reference"]
)
def test_every_layout_loads_the_same_weights(
    reference: Reference, gloo_pool: GlooPool, world_size: int, layout: dict[str, int]
) -> None:
    check_loaded_weights(reference, gloo_pool, world_size, layout)
