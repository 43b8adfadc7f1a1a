"""Gemma 3, text: five layers with a window and a rotary base of their own, then one without."""

from __future__ import annotations

from ascend_run.families import (
    DECODER,
    FamilyPlugin,
    attention_bias,
    derived,
    family_manifest,
    layer_types,
    sliding_window,
)
from ascend_run.plugin_api import ConfigKey


class Gemma3(FamilyPlugin):
    """Hugging Face's ``gemma3_text``: Gemma 2 with norms of queries and keys, without softcaps."""

    family = derived(
        DECODER,
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        defaults={
            "model.activation": "gelu_tanh",
            "model.kv_channels": 256,
            "model.layernorm_epsilon": 1e-6,
            "model.layernorm_zero_centered_gamma": True,
            "model.scale_embedding": True,
            "model.share_embeddings_and_output_weights": True,
            "model.norm_placement": "both",
            "model.qk_layernorm": True,
            "model.rotary_base": 1e6,
            "model.rotary_local_base": 1e4,
            "model.window_size": (4095, 0),
            "model.window_attn_skip_freq": 6,
        },
        keys=(
            *attention_bias(),
            *sliding_window(4096),
            *layer_types(),
            ConfigKey(hf="rope_local_base_freq", field="model.rotary_local_base", default=1e4),
            ConfigKey(
                hf="query_pre_attn_scalar",
                field="model.softmax_scale",
                default=256,
                form="inverse_square_root",
            ),
        ),
        key_defaults={
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 4,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
        },
        fixed={
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_act": ("gelu_pytorch_tanh", None),
            "use_bidirectional_attention": (False, None),
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "sliding_window_pattern": 6,
        },
        # The pattern that layer_types was written from.
        ignored=("_sliding_window_pattern", "cache_implementation"),
        names={
            ".post_attention_layernorm.": ".pre_feedforward_layernorm.",
            ".post_self_attn_layernorm.": ".post_attention_layernorm.",
            ".post_mlp_layernorm.": ".post_feedforward_layernorm.",
        },
    )
    manifest = family_manifest(family, "Gemma 3 (text)", source="arXiv:2503.19786")
