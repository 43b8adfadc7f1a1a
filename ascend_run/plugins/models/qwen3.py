"""Qwen3: norms on every query and key in place of Qwen2's biases."""

from __future__ import annotations

from ascend_run.families import (
    DECODER,
    FamilyPlugin,
    attention_bias,
    derived,
    family_manifest,
    optional_window,
)


class Qwen3(FamilyPlugin):
    """Llama with RMSNorm on each head's query and key; Hugging Face's ``qwen3``."""

    family = derived(
        DECODER,
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        defaults={
            "model.qk_layernorm": True,
            "model.kv_channels": 128,
            "model.layernorm_epsilon": 1e-6,
        },
        keys=(*attention_bias(), *optional_window()),
        key_defaults={"head_dim": 128, "max_position_embeddings": 32768, "num_key_value_heads": 32},
    )
    manifest = family_manifest(family, "Qwen3", source="arXiv:2505.09388")
