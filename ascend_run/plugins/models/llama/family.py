"""Llama as data: its config keys and tensor names in Megatron and Hugging Face."""

from __future__ import annotations

from typing import Final

from ascend_run.plugin_api import ModelFamily, families

FAMILY: Final = ModelFamily(
    model_type="llama",
    architecture="LlamaForCausalLM",
    defaults=families.decoder_defaults(rotary_base=10000.0),
    keys=families.decoder_keys(
        intermediate_size="model.ffn_hidden_size",
        num_key_value_heads=None,
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
    ),
    # A bias on the attention alone (Hugging Face's attention_bias adds one to q, k, v and o) has
    # no counterpart in Megatron, whose add_bias_linear adds one to the MLP as well.
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    ignored=families.NUMBERLESS_KEYS | {"max_sequence_length", "pretraining_tp"},
    tensors=(
        *families.outer_tensors(),
        *families.attention_tensors(),
        *families.gated_mlp_tensors(),
    ),
)
