"""A tiny gpt-oss, and its shards as Megatron lays them out, written from the rules alone.

Nothing is shared with the package: names and shards are made here, with plain indexing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import attrs
import torch
from torch import Tensor

from .megatron_files import (
    EXPERTS,
    FFN,
    GROUPS,
    HEADS,
    HIDDEN,
    VOCABULARY,
    WIDTH,
    write_hugging_face,
)


def biased_hugging_face(folder: Path) -> dict[str, Tensor]:
    """Write a gpt-oss of random weights and biases; return its tensors."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    hf = {
        "model.embed_tokens.weight": random(VOCABULARY, HIDDEN),
        "model.norm.weight": random(HIDDEN),
        "lm_head.weight": random(VOCABULARY, HIDDEN),
    }
    for layer in range(4):
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            hf[f"{at}{norm}.weight"] = random(HIDDEN)
        for part, heads in (("q", HEADS), ("k", GROUPS), ("v", GROUPS)):
            hf[f"{at}self_attn.{part}_proj.weight"] = random(heads * WIDTH, HIDDEN)
            hf[f"{at}self_attn.{part}_proj.bias"] = random(heads * WIDTH)
        hf[f"{at}self_attn.o_proj.weight"] = random(HIDDEN, HEADS * WIDTH)
        hf[f"{at}self_attn.o_proj.bias"] = random(HIDDEN)
        hf[f"{at}self_attn.sinks"] = random(HEADS)
        hf[f"{at}mlp.router.weight"] = random(EXPERTS, HIDDEN)
        hf[f"{at}mlp.router.bias"] = random(EXPERTS)
        hf[f"{at}mlp.experts.gate_up_proj"] = random(EXPERTS, HIDDEN, 2 * FFN)
        hf[f"{at}mlp.experts.gate_up_proj_bias"] = random(EXPERTS, 2 * FFN)
        hf[f"{at}mlp.experts.down_proj"] = random(EXPERTS, FFN, HIDDEN)
        hf[f"{at}mlp.experts.down_proj_bias"] = random(EXPERTS, HIDDEN)
    return write_hugging_face(
        folder,
        "gpt_oss",
        hf,
        num_key_value_heads=GROUPS,
        head_dim=WIDTH,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        sliding_window=5,
        swiglu_limit=0.8,
        tie_word_embeddings=False,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    )


@attrs.frozen(kw_only=True)
class BiasedRank:
    """One rank of a layout, and which shards it has."""

    tp: int
    ep: int
    tp_size: int
    ep_size: int
    expert_tp_size: int
    numbered: bool
    """Experts as Transformer Engine's grouped linear numbers them."""

    def layer(self, hf: Mapping[str, Tensor], layer: int) -> dict[str, Tensor]:
        """Return the sinks, the router and the experts of a layer, by name within it."""
        at = f"model.layers.{layer}."
        heads = HEADS // self.tp_size
        state = {
            "self_attention.core_attention.softmax_offset": hf[f"{at}self_attn.sinks"][
                self.tp * heads : (self.tp + 1) * heads
            ],
            "self_attention.linear_proj.bias": hf[f"{at}self_attn.o_proj.bias"],
            "mlp.router.weight": hf[f"{at}mlp.router.weight"],
            "mlp.router.bias": hf[f"{at}mlp.router.bias"],
        }
        held = EXPERTS // self.ep_size
        width = FFN // self.expert_tp_size
        first = self.tp % self.expert_tp_size * width
        for local in range(held):
            one = {
                name: hf[f"{at}mlp.experts.{name}"][self.ep * held + local]
                for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
            }
            gate, up = (
                [*range(2 * first + odd, 2 * (first + width), 2)] for odd in (0, 1)
            )  # columns of gate and up alternate in gate_up_proj
            parts = {
                "fc1.weight": one["gate_up_proj"][:, gate + up].t(),
                "fc1.bias": one["gate_up_proj_bias"][gate + up],
                "fc2.weight": one["down_proj"][first : first + width].t(),
                "fc2.bias": one["down_proj_bias"],
            }
            for name, tensor in parts.items():
                linear = f"mlp.experts.local_experts.{local}.linear_{name}"
                state[f"mlp.experts.linear_{name}{local}" if self.numbered else linear] = tensor
        return state
