"""Tensors of models that do not name them as Llama does, under ascend-run's names, by hand."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from tests.support.decoder_layout import Tensors, decoder_layout

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


def grok1(theirs: Tensors, config: Any) -> Tensors:
    """Stack the experts, and give the rest the names that decoders usually have."""
    found = {}
    for name, tensor in theirs.items():
        if ".experts." not in name:
            short = name.replace(".attn.", ".self_attn.").replace(".moe_block.", ".mlp.")
            found[short.replace(".scale", ".weight")] = tensor
    for layer in range(config.num_hidden_layers):
        at, ours = f"model.layers.{layer}.moe_block", f"model.layers.{layer}.mlp.experts"
        linear, linear_v, linear_1 = (
            torch.stack(
                [theirs[f"{at}.experts.{x}.{part}.weight"] for x in range(config.num_experts)]
            )
            for part in ("linear", "linear_v", "linear_1")
        )
        found[f"{ours}.gate_up_proj"] = torch.cat((linear, linear_v), dim=1)
        found[f"{ours}.down_proj"] = linear_1
    norms = {
        "input_layernorm": "pre_attn_norm",
        "self_attn_bda.norm": "post_attn_norm",
        "pre_mlp_layernorm": "pre_moe_norm",
        "mlp_bda.norm": "post_moe_norm",
    }
    return decoder_layout(found, config, norms)


def gpt_oss(theirs: Tensors, config: Any) -> Tensors:
    """In memory gate and up alternate, in matrices [in, out]."""

    def halves(x: Tensor) -> Tensor:
        return torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)

    found = decoder_layout(theirs, config)
    for layer in range(config.num_hidden_layers):
        at, our = f"model.layers.{layer}", f"decoder.layers.{layer}"
        sinks = theirs[f"{at}.self_attn.sinks"]
        found[f"{our}.self_attention.core_attention.softmax_offset"] = sinks
        for part in ("weight", "bias"):
            found[f"{our}.mlp.router.{part}"] = theirs[f"{at}.mlp.router.{part}"]
        there, here = f"{at}.mlp.experts", f"{our}.mlp.experts"
        found[f"{here}.fc1"] = halves(theirs[f"{there}.gate_up_proj"]).mT
        found[f"{here}.fc1_bias"] = halves(theirs[f"{there}.gate_up_proj_bias"])
        found[f"{here}.fc2"] = theirs[f"{there}.down_proj"].mT
        found[f"{here}.fc2_bias"] = theirs[f"{there}.down_proj_bias"]
    return found


def phimoe(theirs: Tensors, config: Any) -> Tensors:
    """Norms and the output layer have biases."""
    found = decoder_layout(theirs, config)
    names = {"decoder.final_layernorm.bias": "model.norm.bias"}
    if config.lm_head_bias:
        names["output_layer.bias"] = "lm_head.bias"
    for layer in range(config.num_hidden_layers):
        at, our = f"model.layers.{layer}", f"decoder.layers.{layer}"
        names |= {
            f"{our}.input_layernorm.bias": f"{at}.input_layernorm.bias",
            f"{our}.pre_mlp_layernorm.bias": f"{at}.post_attention_layernorm.bias",
            f"{our}.mlp.router.weight": f"{at}.mlp.router.weight",
        }
    return found | {name: theirs[stored] for name, stored in names.items()}


def latent_decoder(theirs: Tensors, config: Any) -> Tensors:
    """In memory transformers stacks its experts as we do."""
    ours = {
        "embedding.word_embeddings.weight": theirs["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": theirs["model.norm.weight"],
    }
    if not config.tie_word_embeddings:
        ours["output_layer.weight"] = theirs["lm_head.weight"]
    dense = getattr(config, "first_k_dense_replace", config.num_hidden_layers)
    for layer in range(config.num_hidden_layers):
        at, our = f"model.layers.{layer}", f"decoder.layers.{layer}"
        for name, own in LATENT.items():
            if f"{at}.self_attn.{name}.weight" in theirs:
                ours[f"{our}.self_attention.{own}.weight"] = theirs[f"{at}.self_attn.{name}.weight"]
        ours[f"{our}.input_layernorm.weight"] = theirs[f"{at}.input_layernorm.weight"]
        ours[f"{our}.pre_mlp_layernorm.weight"] = theirs[f"{at}.post_attention_layernorm.weight"]
        gated = {f"{at}.mlp": f"{our}.mlp"}
        if layer >= dense:
            gated = {f"{at}.mlp.shared_experts": f"{our}.mlp.shared_experts"}
            ours[f"{our}.mlp.router.weight"] = theirs[f"{at}.mlp.gate.weight"]
            if (bias := theirs.get(f"{at}.mlp.gate.e_score_correction_bias")) is not None:
                ours[f"{our}.mlp.router.expert_bias"] = bias
            ours[f"{our}.mlp.experts.fc1"] = theirs[f"{at}.mlp.experts.gate_up_proj"]
            ours[f"{our}.mlp.experts.fc2"] = theirs[f"{at}.mlp.experts.down_proj"]
        for there, here in gated.items():
            for part in ("weight", "bias"):
                if f"{there}.down_proj.{part}" in theirs:
                    gate, up, down = (
                        theirs[f"{there}.{name}_proj.{part}"] for name in ("gate", "up", "down")
                    )
                    ours[f"{here}.linear_fc1.{part}"] = torch.cat((gate, up))
                    ours[f"{here}.linear_fc2.{part}"] = down
    return ours
