"""GLM-4 9B: half of each head rotated, neighbours as pairs; biases on q, k and v."""

from __future__ import annotations

from ascend_run.families import DECODER, FamilyPlugin, derived, family_manifest, fused_gate_up
from ascend_run.plugin_api import ConfigKey


class Glm(FamilyPlugin):
    """Hugging Face's ``glm``."""

    family = derived(
        DECODER,
        model_type="glm",
        architecture="GlmForCausalLM",
        defaults={
            "model.add_qkv_bias": True,
            "model.kv_channels": 128,
            "model.layernorm_epsilon": 1.5625e-7,
            "model.rotary_interleaved": True,
            "model.rotary_percent": 0.5,
        },
        keys=(
            ConfigKey(hf="attention_bias", field="model.add_qkv_bias", default=True),
            ConfigKey(hf="partial_rotary_factor", field="model.rotary_percent", default=0.5),
        ),
        key_defaults={
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1.5625e-7,
        },
        tensors=fused_gate_up("mlp.gate_up_proj"),
    )
    manifest = family_manifest(family, "GLM", source="arXiv:2406.12793")
