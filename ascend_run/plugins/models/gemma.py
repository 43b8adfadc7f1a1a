"""Gemma: GELU in the gated MLP, norms of 1 + weight, embeddings scaled by the width."""

from __future__ import annotations

from ascend_run.families import GEMMA, FamilyPlugin, derived, family_manifest


class Gemma(FamilyPlugin):
    """Hugging Face's ``gemma``."""

    family = derived(
        GEMMA,
        model_type="gemma",
        architecture="GemmaForCausalLM",
        key_defaults={"num_key_value_heads": 16},
        fixed={
            "hidden_act": ("gelu_pytorch_tanh", "gelu"),  # the same, by transformers' own reading
            "hidden_activation": (None, "gelu_pytorch_tanh"),
        },
    )
    manifest = family_manifest(family, "Gemma", source="arXiv:2403.08295")
