"""Qwen1.5, Qwen2, Qwen2.5 and what derives from them (Math, Coder, R1-Distill-Qwen)."""

from __future__ import annotations

from ascend_run.families import DECODER, FamilyPlugin, derived, family_manifest, optional_window


class Qwen2(FamilyPlugin):
    """Llama with biases on queries, keys and values; Hugging Face's ``qwen2``."""

    family = derived(
        DECODER,
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        defaults={"model.add_qkv_bias": True, "model.layernorm_epsilon": 1e-6},
        keys=optional_window(),
        fixed={"use_mrope": False},
        key_defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32},
    )
    manifest = family_manifest(family, "Qwen2", source="arXiv:2407.10671, arXiv:2412.15115")
