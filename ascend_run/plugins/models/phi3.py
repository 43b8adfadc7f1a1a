"""Phi-3, Phi-3.5 and Phi-4 (mini too): fused projections, a window, longrope."""

from __future__ import annotations

from ascend_run.families import (
    DECODER,
    FamilyPlugin,
    derived,
    family_manifest,
    forms,
    fused_gate_up,
    fused_qkv,
    sliding_window,
)
from ascend_run.plugin_api import ConfigKey


class Phi3(FamilyPlugin):
    """Hugging Face's ``phi3``."""

    family = derived(
        DECODER,
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        keys=(
            *sliding_window(None),
            ConfigKey(hf="resid_pdrop", field="model.hidden_dropout", default=0.0),
            ConfigKey(hf="embd_pdrop", field="model.hidden_dropout", default=0.0),
            ConfigKey(hf="partial_rotary_factor", field="model.rotary_percent", default=1.0),
            ConfigKey(
                hf="original_max_position_embeddings",
                field="model.rope_scaling_original_max_position_embeddings",
                default=4096,
                form=forms.LONGROPE_LENGTH,
            ),
        ),
        key_defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        fixed={"attention_bias": False, "lm_head_bias": False, "mlp_bias": False},
        ignored=("full_attn_mod", "interpolate_factor"),  # read by no published code
        tensors=(*fused_qkv("self_attn.qkv_proj"), *fused_gate_up("mlp.gate_up_proj")),
    )
    manifest = family_manifest(family, "Phi-3", source="arXiv:2404.14219, arXiv:2503.01743")
