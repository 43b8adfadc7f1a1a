"""Gemma 2: norms on both sides, softcaps, a window in every other layer."""

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


class Gemma2(FamilyPlugin):
    """Hugging Face's ``gemma2``."""

    family = derived(
        DECODER,
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        defaults={
            "model.activation": "gelu_tanh",
            "model.kv_channels": 256,
            "model.layernorm_epsilon": 1e-6,
            "model.layernorm_zero_centered_gamma": True,
            "model.scale_embedding": True,
            "model.share_embeddings_and_output_weights": True,
            "model.norm_placement": "both",
            "model.attn_logit_softcapping": 50.0,
            "model.final_logit_softcapping": 30.0,
            "model.window_size": (4095, 0),
            "model.window_attn_skip_freq": 2,
        },
        keys=(
            *attention_bias(),
            *sliding_window(4096),
            *layer_types(),
            ConfigKey(
                hf="query_pre_attn_scalar",
                field="model.softmax_scale",
                default=256,
                form="inverse_square_root",
            ),
            *(
                ConfigKey(hf=name, field=f"model.{name}", default=cap, nullable=True)
                for name, cap in (
                    ("attn_logit_softcapping", 50.0),
                    ("final_logit_softcapping", 30.0),
                )
            ),
        ),
        key_defaults={
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        },
        fixed={
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_act": ("gelu_pytorch_tanh", None),
            "use_bidirectional_attention": (None, False),
        },
        ignored=("cache_implementation",),
        names={
            ".post_attention_layernorm.": ".pre_feedforward_layernorm.",
            ".post_self_attn_layernorm.": ".post_attention_layernorm.",
            ".post_mlp_layernorm.": ".post_feedforward_layernorm.",
        },
    )
    manifest = family_manifest(family, "Gemma 2", source="arXiv:2408.00118")
