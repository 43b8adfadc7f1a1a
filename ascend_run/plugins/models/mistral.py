"""Mistral 7B and later dense models: Llama with a sliding window."""

from __future__ import annotations

from ascend_run.families import DECODER, FamilyPlugin, derived, family_manifest, sliding_window


class Mistral(FamilyPlugin):
    """Hugging Face's ``mistral``."""

    family = derived(
        DECODER,
        model_type="mistral",
        architecture="MistralForCausalLM",
        keys=sliding_window(4096),
        key_defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8},
    )
    manifest = family_manifest(family, "Mistral", source="arXiv:2310.06825")
