"""Data shared by Llama-like model families, so that a new one declares only its differences.

The Hugging Face names are those of transformers' decoders: ``model.layers.N.self_attn...``.
"""

from __future__ import annotations

from typing import Final

from .contracts import ConfigKey, TensorMap

LAYER: Final = "decoder.layers.{layer}"
HF_LAYER: Final = "model.layers.{layer}"

NUMBERLESS_KEYS: Final = frozenset(
    {
        "_name_or_path",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "unk_token_id",
        "use_cache",
    }
)
"""Keys of a config.json that do not affect the model's output, in any family."""


def decoder_defaults(*, rotary_base: float) -> dict[str, object]:
    """Return the config of a Llama-like decoder: RMSNorm, SwiGLU, RoPE, no biases, no dropout."""
    return {
        "model.normalization": "RMSNorm",
        "model.layernorm_epsilon": 1e-5,
        "model.activation": "silu",
        "model.gated_linear_unit": True,
        "model.add_bias_linear": False,
        "model.position_embedding_type": "rope",
        "model.rotary_base": rotary_base,
        "model.rotary_percent": 1.0,
        "model.share_embeddings_and_output_weights": False,
        "model.attention_dropout": 0.0,
        "model.hidden_dropout": 0.0,
    }


def decoder_keys(
    *,
    intermediate_size: str,
    num_key_value_heads: int | None,
    max_position_embeddings: int,
    rms_norm_eps: float,
    rope_theta: float,
) -> tuple[ConfigKey, ...]:
    """Return the config.json keys that all Llama-like families have.

    Args:
        intermediate_size: Config field that this key maps to: the width of a dense MLP, or of an
            expert.
        num_key_value_heads: Like the following arguments, transformers' default for a missing key;
            None: as many as query heads.
    """
    return (
        ConfigKey(hf="vocab_size", field="model.vocab_size"),
        ConfigKey(hf="hidden_size", field="model.hidden_size"),
        ConfigKey(hf="intermediate_size", field=intermediate_size),
        ConfigKey(hf="num_hidden_layers", field="model.num_layers"),
        ConfigKey(hf="num_attention_heads", field="model.num_attention_heads"),
        ConfigKey(
            hf="num_key_value_heads", field="model.num_query_groups", default=num_key_value_heads
        ),
        ConfigKey(hf="head_dim", field="model.kv_channels", default=None),
        ConfigKey(
            hf="max_position_embeddings",
            field="model.max_position_embeddings",
            default=max_position_embeddings,
        ),
        ConfigKey(hf="initializer_range", field="model.init_method_std", default=0.02),
        ConfigKey(hf="rms_norm_eps", field="model.layernorm_epsilon", default=rms_norm_eps),
        ConfigKey(hf="rope_theta", field="model.rotary_base", default=rope_theta),
        ConfigKey(hf="attention_dropout", field="model.attention_dropout", default=0.0),
        ConfigKey(
            hf="tie_word_embeddings",
            field="model.share_embeddings_and_output_weights",
            default=False,
        ),
    )


def attention_tensors() -> tuple[TensorMap, ...]:
    """Return the tensors of self-attention without biases, and of the norms before the attention
    and MLP blocks."""
    return (
        TensorMap(
            megatron=f"{LAYER}.input_layernorm.weight", hf=(f"{HF_LAYER}.input_layernorm.weight",)
        ),
        TensorMap(
            megatron=f"{LAYER}.self_attention.linear_qkv.weight",
            hf=tuple(f"{HF_LAYER}.self_attn.{part}_proj.weight" for part in "qkv"),
            form="qkv",
        ),
        TensorMap(
            megatron=f"{LAYER}.self_attention.linear_proj.weight",
            hf=(f"{HF_LAYER}.self_attn.o_proj.weight",),
        ),
        TensorMap(
            megatron=f"{LAYER}.pre_mlp_layernorm.weight",
            hf=(f"{HF_LAYER}.post_attention_layernorm.weight",),
        ),
    )


def gated_mlp_tensors() -> tuple[TensorMap, ...]:
    """Return the tensors of a gated dense MLP."""
    return (
        TensorMap(
            megatron=f"{LAYER}.mlp.linear_fc1.weight",
            hf=(f"{HF_LAYER}.mlp.gate_proj.weight", f"{HF_LAYER}.mlp.up_proj.weight"),
            form="concat",
        ),
        TensorMap(
            megatron=f"{LAYER}.mlp.linear_fc2.weight", hf=(f"{HF_LAYER}.mlp.down_proj.weight",)
        ),
    )


def outer_tensors() -> tuple[TensorMap, ...]:
    """Return the tensors outside the layers: embedding, final norm and output layer."""
    return (
        TensorMap(megatron="embedding.word_embeddings.weight", hf=("model.embed_tokens.weight",)),
        TensorMap(megatron="decoder.final_layernorm.weight", hf=("model.norm.weight",)),
        TensorMap(megatron="output_layer.weight", hf=("lm_head.weight",)),
    )
