"""InternLM3: Llama with a head size of its own."""

from __future__ import annotations

from ascend_run.families import DECODER, FamilyPlugin, derived, family_manifest


class InternLM3(FamilyPlugin):
    """Hugging Face's ``internlm3``."""

    family = derived(
        DECODER,
        model_type="internlm3",
        architecture="InternLM3ForCausalLM",
        defaults={"model.kv_channels": 128},
        key_defaults={
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
        },
        fixed={"attention_bias": False, "bias": False, "mlp_bias": False, "qkv_bias": False},
    )
    manifest = family_manifest(family, "InternLM3", source="transformers/models/internlm3")
