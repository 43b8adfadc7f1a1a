"""Llama as data: what its config keys and tensors are called on both sides."""

from __future__ import annotations

from typing import Final

from ascend_run.plugin_api import ConfigKey, ModelFamily, TensorMap

_LAYER: Final = "decoder.layers.{layer}"
_HF_LAYER: Final = "model.layers.{layer}"

FAMILY: Final = ModelFamily(
    model_type="llama",
    architecture="LlamaForCausalLM",
    defaults={
        "model.normalization": "RMSNorm",
        "model.layernorm_epsilon": 1e-5,
        "model.activation": "silu",
        "model.gated_linear_unit": True,
        "model.add_bias_linear": False,
        "model.position_embedding_type": "rope",
        "model.rotary_base": 10000.0,
        "model.rotary_percent": 1.0,
        "model.share_embeddings_and_output_weights": False,
        "model.attention_dropout": 0.0,
        "model.hidden_dropout": 0.0,
    },
    keys=(
        ConfigKey(hf="vocab_size", field="model.vocab_size"),
        ConfigKey(hf="hidden_size", field="model.hidden_size"),
        ConfigKey(hf="intermediate_size", field="model.ffn_hidden_size"),
        ConfigKey(hf="num_hidden_layers", field="model.num_layers"),
        ConfigKey(hf="num_attention_heads", field="model.num_attention_heads"),
        ConfigKey(hf="num_key_value_heads", field="model.num_query_groups", default=None),
        ConfigKey(hf="head_dim", field="model.kv_channels", default=None),
        ConfigKey(
            hf="max_position_embeddings", field="model.max_position_embeddings", default=2048
        ),
        ConfigKey(hf="initializer_range", field="model.init_method_std", default=0.02),
        ConfigKey(hf="rms_norm_eps", field="model.layernorm_epsilon", default=1e-6),
        ConfigKey(hf="rope_theta", field="model.rotary_base", default=10000.0),
        ConfigKey(hf="attention_dropout", field="model.attention_dropout", default=0.0),
        ConfigKey(
            hf="tie_word_embeddings",
            field="model.share_embeddings_and_output_weights",
            default=False,
        ),
    ),
    # A bias on the attention alone (Hugging Face's attention_bias puts one on q, k, v and o) has
    # no counterpart in Megatron, whose add_bias_linear gives the feed-forward one as well.
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    ignored=frozenset(
        {
            "_name_or_path",
            "bos_token_id",
            "dtype",
            "eos_token_id",
            "max_sequence_length",
            "output_attentions",
            "output_hidden_states",
            "pad_token_id",
            "pretraining_tp",
            "torch_dtype",
            "transformers_version",
            "unk_token_id",
            "use_cache",
        }
    ),
    tensors=(
        TensorMap(megatron="embedding.word_embeddings.weight", hf=("model.embed_tokens.weight",)),
        TensorMap(
            megatron=f"{_LAYER}.input_layernorm.weight", hf=(f"{_HF_LAYER}.input_layernorm.weight",)
        ),
        TensorMap(
            megatron=f"{_LAYER}.self_attention.linear_qkv.weight",
            hf=tuple(f"{_HF_LAYER}.self_attn.{part}_proj.weight" for part in "qkv"),
            form="qkv",
        ),
        TensorMap(
            megatron=f"{_LAYER}.self_attention.linear_proj.weight",
            hf=(f"{_HF_LAYER}.self_attn.o_proj.weight",),
        ),
        TensorMap(
            megatron=f"{_LAYER}.pre_mlp_layernorm.weight",
            hf=(f"{_HF_LAYER}.post_attention_layernorm.weight",),
        ),
        TensorMap(
            megatron=f"{_LAYER}.mlp.linear_fc1.weight",
            hf=(f"{_HF_LAYER}.mlp.gate_proj.weight", f"{_HF_LAYER}.mlp.up_proj.weight"),
            form="concat",
        ),
        TensorMap(
            megatron=f"{_LAYER}.mlp.linear_fc2.weight", hf=(f"{_HF_LAYER}.mlp.down_proj.weight",)
        ),
        TensorMap(megatron="decoder.final_layernorm.weight", hf=("model.norm.weight",)),
        TensorMap(megatron="output_layer.weight", hf=("lm_head.weight",)),
    ),
)
