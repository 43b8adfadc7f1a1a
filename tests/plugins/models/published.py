"""Models of architectures that transformers has, as their authors publish them under other names.

Each function takes the tensors and the config of transformers' model and returns those of the
authors' folder. Written from the authors' published code, by hand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.decoder_layout import Tensors, by_group
from tests.support.family_checks import stored

Published = tuple[Tensors, dict[str, Any]]
Publish = Callable[[Tensors, dict[str, Any], Any], Published]


def publish(folder: Path, change: Publish, config: Any) -> None:
    """Rewrite a folder in place."""
    theirs = json.loads((folder / "config.json").read_text())
    common = {
        name: theirs[name]
        for name in ("hidden_size", "num_attention_heads", "attention_dropout")
        if name in theirs
    }
    common |= {
        "initializer_range": theirs["initializer_range"],
        "tie_word_embeddings": theirs["tie_word_embeddings"],
        "torch_dtype": "float32",
        "use_cache": True,
    }
    tensors, config_json = change(stored(folder), common, config)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    save_file({n: x.contiguous() for n, x in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_json))


def _decoder(common: dict[str, Any], config: Any, model_type: str, name: str) -> dict[str, Any]:
    """The keys that most authors took over from Llama."""
    return {
        **common,
        "model_type": model_type,
        "architectures": [name],
        "auto_map": {"AutoModelForCausalLM": f"modeling_{model_type}.{name}"},
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_scaling": None,
    }


def _renamed(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> Tensors:
    found = {}
    for name, tensor in tensors.items():
        for old, new in names.items():
            name = name.replace(old, new)
        found[name] = tensor
    return found


def _packed(
    tensors: Tensors, config: Any, name: str, pack: Callable[[list[Tensor]], Tensor]
) -> Tensors:
    """Replace the projections of q, k and v by one tensor."""
    left = {
        n: x for n, x in tensors.items() if n.split(".")[-2] not in ("q_proj", "k_proj", "v_proj")
    }
    for layer in range(config.num_hidden_layers):
        for part in ("weight", "bias"):
            at = f"model.layers.{layer}.self_attn"
            if f"{at}.q_proj.{part}" in tensors:
                qkv = [tensors[f"{at}.{which}_proj.{part}"] for which in "qkv"]
                left[f"model.layers.{layer}.{name}.{part}"] = pack(qkv)
    return left


def aquila(tensors: Tensors, common: dict[str, Any], config: Any) -> Published:
    return tensors, _decoder(common, config, "aquila", "AquilaForCausalLM")


def internlm(tensors: Tensors, common: dict[str, Any], config: Any) -> Published:
    found = _decoder(common, config, "internlm", "InternLMForCausalLM")
    found["rotary"] = {"base": found.pop("rope_theta"), "type": "dynamic"}
    return tensors, {**found, "bias": config.attention_bias}


def internlm2(tensors: Tensors, common: dict[str, Any], config: Any) -> Published:
    packed = _packed(tensors, config, "attention.wqkv", lambda qkv: by_group(qkv, config))
    names = {
        "model.embed_tokens": "model.tok_embeddings",
        "lm_head": "output",
        "self_attn.o_proj": "attention.wo",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    }
    found = _decoder(common, config, "internlm2", "InternLM2ForCausalLM")
    return _renamed(packed, names), {**found, "bias": config.attention_bias}


def internlm3(tensors: Tensors, common: dict[str, Any], config: Any) -> Published:
    found = _decoder(common, config, "internlm3", "InternLM3ForCausalLM")
    return tensors, {**found, "head_dim": config.head_dim, "bias": False, "qkv_bias": False}


def baichuan(tensors: Tensors, common: dict[str, Any], config: Any) -> Published:
    packed = _packed(tensors, config, "self_attn.W_pack", torch.cat)
    found = _decoder(common, config, "baichuan", "BaiChuanForCausalLM")
    for absent in ("num_key_value_heads", "attention_dropout"):
        del found[absent]
    return packed, found


def baichuan2(tensors: Tensors, common: dict[str, Any], config: Any) -> Published:
    packed, found = baichuan(tensors, common, config)
    longest = config.max_position_embeddings
    found |= {"architectures": ["BaichuanForCausalLM"], "model_max_length": longest}
    return packed, {**found, "tokenizer_class": "BaichuanTokenizer", "_from_model_config": True}


def baichuan_13b(tensors: Tensors, common: dict[str, Any], config: Any) -> Published:
    packed, found = baichuan2(tensors, common, config)
    for absent in ("max_position_embeddings", "rope_theta", "rope_scaling"):
        del found[absent]
    return packed, {**found, "gradient_checkpointing": [False]}


def qwen(tensors: Tensors, common: dict[str, Any], config: Any) -> Published:
    packed = _packed(tensors, config, "self_attn.c_attn", torch.cat)
    names = {
        "model.layers.": "transformer.h.",
        "model.embed_tokens": "transformer.wte",
        "model.norm": "transformer.ln_f",
        "self_attn.c_attn": "attn.c_attn",
        "self_attn.o_proj": "attn.c_proj",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "mlp.up_proj": "mlp.w1",
        "mlp.gate_proj": "mlp.w2",
        "mlp.down_proj": "mlp.c_proj",
    }
    found = {name: value for name, value in common.items() if name != "attention_dropout"}
    return _renamed(packed, names), {
        **found,
        "architectures": ["QWenLMHeadModel"],
        "attn_dropout_prob": 0.0,
        "bf16": False,
        "emb_dropout_prob": 0.0,
        "fp16": False,
        "fp32": False,
        "intermediate_size": 2 * config.intermediate_size,
        "kv_channels": config.hidden_size // config.num_attention_heads,
        "layer_norm_epsilon": config.rms_norm_eps,
        "max_position_embeddings": 32768,
        "model_type": "qwen",
        "no_bias": True,
        "num_hidden_layers": config.num_hidden_layers,
        "onnx_safe": None,
        "rotary_emb_base": config.rope_parameters["rope_theta"],
        "rotary_pct": 1.0,
        "scale_attn_weights": True,
        "seq_length": config.max_position_embeddings,
        "tokenizer_class": "QWenTokenizer",
        "use_dynamic_ntk": True,
        "use_flash_attn": "auto",
        "use_logn_attn": True,
        "vocab_size": config.vocab_size,
    }


def minicpm(tensors: Tensors, common: dict[str, Any], config: Any) -> Published:
    found = _decoder(common, config, "minicpm", "MiniCPMForCausalLM")
    depth = config.residual_multiplier * math.sqrt(config.num_hidden_layers)
    return tensors, {
        **found,
        "scale_emb": config.embedding_multiplier,
        "scale_depth": round(depth, 9),
        "dim_model_base": round(config.hidden_size / config.logits_scaling),
    }


def minicpm_moe(tensors: Tensors, common: dict[str, Any], config: Any) -> Published:
    """Experts one by one, and gate and up projections as two tensors."""
    found = {}
    for name, tensor in tensors.items():
        layer, block, part = name.partition(".block_sparse_moe.")
        if not block:
            found[name] = tensor
        elif part == "router.layer.weight":
            found[f"{layer}.mlp.gate.weight"] = tensor
        else:
            names = ("w1", "w3") if part.startswith("input") else ("w2",)
            for expert, matrix in enumerate(tensor):
                for its, rows in zip(names, matrix.chunk(len(names)), strict=True):
                    found[f"{layer}.mlp.experts.{expert}.{its}.weight"] = rows
    own = {"num_experts": config.num_local_experts}
    own["num_experts_per_tok"] = config.num_experts_per_tok
    return found, {**minicpm(tensors, common, config)[1], **own}


def grok1(tensors: Tensors, common: dict[str, Any], config: Any) -> Published:
    """It stands as published; rewritten with the keys of those folders."""
    kept = {
        name: value
        for name, value in vars(config).items()
        if not name.endswith("token_id") and name != "attention_dropout"
    }
    kept |= {name: common[name] for name in ("torch_dtype", "use_cache")}
    own = {"model_type": "grok-1", "architectures": ["Grok1ModelForCausalLM"]}
    return tensors, {**kept, **own, "output_router_logits": False}


def chatglm(tensors: Tensors, common: dict[str, Any], config: Any) -> Published:
    packed = _packed(tensors, config, "self_attention.query_key_value", torch.cat)
    names = {
        "model.layers.": "transformer.encoder.layers.",
        "model.embed_tokens": "transformer.embedding.word_embeddings",
        "model.norm": "transformer.encoder.final_layernorm",
        "lm_head": "transformer.output_layer",
        "self_attn.o_proj": "self_attention.dense",
        "mlp.gate_up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    }
    found = {
        **{name: value for name, value in common.items() if name != "initializer_range"},
        "model_type": "chatglm",
        "architectures": ["ChatGLMModel"],
        "add_bias_linear": False,
        "add_qkv_bias": config.attention_bias,
        "apply_query_key_layer_scaling": True,
        "apply_residual_connection_post_layernorm": False,
        "attention_softmax_in_fp32": True,
        "bias_dropout_fusion": True,
        "ffn_hidden_size": config.intermediate_size,
        "fp32_residual_connection": False,
        "hidden_dropout": 0.0,
        "kv_channels": config.head_dim,
        "layernorm_epsilon": config.rms_norm_eps,
        "multi_query_attention": True,
        "multi_query_group_num": config.num_key_value_heads,
        "num_layers": config.num_hidden_layers,
        "original_rope": True,
        "padded_vocab_size": config.vocab_size,
        "post_layer_norm": True,
        "rmsnorm": True,
        "rope_ratio": config.rope_parameters["rope_theta"] / 10000.0,
        "seq_length": config.max_position_embeddings,
    }
    positions = {"transformer.rotary_pos_emb.inv_freq": torch.ones(3)}  # a buffer of some folders
    return {**_renamed(packed, names), **positions}, found


BUFFERS: Final = ("transformer.rotary_pos_emb.inv_freq",)
"""Tensors of the folders above that are no parameters."""
