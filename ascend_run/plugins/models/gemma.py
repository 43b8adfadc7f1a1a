"""Gemma: GELU in the gated MLP, norms of 1 + weight, embeddings scaled by the width."""

from __future__ import annotations

from ascend_run.families import DECODER, FamilyPlugin, attention_bias, derived, family_manifest


class Gemma(FamilyPlugin):
    """Hugging Face's ``gemma``."""

    family = derived(
        DECODER,
        model_type="gemma",
        architecture="GemmaForCausalLM",
        defaults={
            "model.activation": "gelu_tanh",
            "model.kv_channels": 256,
            "model.layernorm_epsilon": 1e-6,
            "model.layernorm_zero_centered_gamma": True,
            "model.scale_embedding": True,
            "model.share_embeddings_and_output_weights": True,
        },
        keys=attention_bias(),
        key_defaults={
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "num_key_value_heads": 16,
            "tie_word_embeddings": True,
        },
        fixed={
            "hidden_act": ("gelu_pytorch_tanh", "gelu"),  # the same, by transformers' own reading
            "hidden_activation": (None, "gelu_pytorch_tanh"),
            "use_bidirectional_attention": (None, False),
        },
    )
    manifest = family_manifest(family, "Gemma", source="arXiv:2403.08295")
