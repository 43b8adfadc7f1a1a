"""Llama, and what is published as one: Yi, CodeLlama, DeepSeek-Math, R1-Distill-Llama."""

from __future__ import annotations

from ascend_run.families import (
    DECODER,
    FamilyPlugin,
    attention_bias,
    derived,
    family_manifest,
    mlp_bias,
)


class Llama(FamilyPlugin):
    """Hugging Face's ``llama``."""

    family = derived(
        DECODER,
        model_type="llama",
        architecture="LlamaForCausalLM",
        keys=(*attention_bias(), *mlp_bias()),
        ignored=("max_sequence_length", "pretraining_tp"),
    )
    manifest = family_manifest(family, "Llama", source="arXiv:2302.13971, arXiv:2307.09288")
