"""Tensors of models that do not name them as Llama does, under ascend-run's names, by hand."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from tests.support.decoder_layout import Tensors

LATENT: Final = {
    "q_proj": "linear_q_proj",
    "q_a_proj": "linear_q_down_proj",
    "q_a_layernorm": "q_layernorm",
    "q_b_proj": "linear_q_up_proj",
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "kv_a_layernorm": "kv_layernorm",
    "kv_b_proj": "linear_kv_up_proj",
    "o_proj": "linear_proj",
}
"""Maps their parts of multi-latent attention to ours."""


def gpt2(theirs: Tensors, config: Any) -> Tensors:
    """Conv1D's weights are [in, out], and those of q, k and v one after the other."""
    heads = config.n_head

    def by_head(fused: Tensor) -> Tensor:
        return fused.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)

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
        for name, stored in (("input_layernorm", "ln_1"), ("pre_mlp_layernorm", "ln_2")):
            for part in ("weight", "bias"):
                ours[f"{our}.{name}.{part}"] = theirs[f"{at}.{stored}.{part}"]
        qkv = f"{our}.self_attention.linear_qkv"
        ours[f"{qkv}.weight"] = by_head(theirs[f"{at}.attn.c_attn.weight"].t())
        ours[f"{qkv}.bias"] = by_head(theirs[f"{at}.attn.c_attn.bias"])
        for name, stored in (
            ("self_attention.linear_proj", "attn.c_proj"),
            ("mlp.linear_fc1", "mlp.c_fc"),
            ("mlp.linear_fc2", "mlp.c_proj"),
        ):
            ours[f"{our}.{name}.weight"] = theirs[f"{at}.{stored}.weight"].t()
            ours[f"{our}.{name}.bias"] = theirs[f"{at}.{stored}.bias"]
    return ours


def bloom(theirs: Tensors, config: Any) -> Tensors:
    """q, k and v are stored by head, as ours are."""
    ours = {"embedding.word_embeddings.weight": theirs["transformer.word_embeddings.weight"]}
    if not config.tie_word_embeddings:
        ours["output_layer.weight"] = theirs["lm_head.weight"]
    names = {
        "embedding.layernorm": "word_embeddings_layernorm",
        "decoder.final_layernorm": "ln_f",
    }
    for layer in range(config.n_layer):
        at, our = f"h.{layer}", f"decoder.layers.{layer}"
        names |= {
            f"{our}.input_layernorm": f"{at}.input_layernorm",
            f"{our}.self_attention.linear_qkv": f"{at}.self_attention.query_key_value",
            f"{our}.self_attention.linear_proj": f"{at}.self_attention.dense",
            f"{our}.pre_mlp_layernorm": f"{at}.post_attention_layernorm",
            f"{our}.mlp.linear_fc1": f"{at}.mlp.dense_h_to_4h",
            f"{our}.mlp.linear_fc2": f"{at}.mlp.dense_4h_to_h",
        }
    for name, stored in names.items():
        for part in ("weight", "bias"):
            ours[f"{name}.{part}"] = theirs[f"transformer.{stored}.{part}"]
    return ours


def deepseek_v2(theirs: Tensors, config: Any) -> Tensors:
    """In memory transformers stacks its experts as we do."""
    ours = {
        "embedding.word_embeddings.weight": theirs["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": theirs["model.norm.weight"],
        "output_layer.weight": theirs["lm_head.weight"],
    }
    for layer in range(config.num_hidden_layers):
        at, our = f"model.layers.{layer}", f"decoder.layers.{layer}"
        for name, own in LATENT.items():
            if f"{at}.self_attn.{name}.weight" in theirs:
                ours[f"{our}.self_attention.{own}.weight"] = theirs[f"{at}.self_attn.{name}.weight"]
        ours[f"{our}.input_layernorm.weight"] = theirs[f"{at}.input_layernorm.weight"]
        ours[f"{our}.pre_mlp_layernorm.weight"] = theirs[f"{at}.post_attention_layernorm.weight"]
        gated = {f"{at}.mlp": f"{our}.mlp"}
        if layer >= config.first_k_dense_replace:
            gated = {f"{at}.mlp.shared_experts": f"{our}.mlp.shared_experts"}
            ours[f"{our}.mlp.router.weight"] = theirs[f"{at}.mlp.gate.weight"]
            ours[f"{our}.mlp.experts.fc1"] = theirs[f"{at}.mlp.experts.gate_up_proj"]
            ours[f"{our}.mlp.experts.fc2"] = theirs[f"{at}.mlp.experts.down_proj"]
        for there, here in gated.items():
            gate, up, down = (theirs[f"{there}.{p}_proj.weight"] for p in ("gate", "up", "down"))
            ours[f"{here}.linear_fc1.weight"] = torch.cat((gate, up))
            ours[f"{here}.linear_fc2.weight"] = down
    return ours
