"""InternLM 1: Llama with biases on q, k, v and the output projection."""

from __future__ import annotations

from ascend_run.families import DECODER, FamilyPlugin, attention_bias, derived, family_manifest
from ascend_run.plugin_api import ConfigKey


class InternLM(FamilyPlugin):
    """The authors' ``internlm``."""

    family = derived(
        DECODER,
        model_type="internlm",
        architecture="InternLMForCausalLM",
        defaults={"model.add_qkv_bias": True, "model.add_linear_proj_bias": True},
        keys=(
            *attention_bias("bias", default=True),
            ConfigKey(
                hf="rotary.base", field="model.rotary_base", default=10000.0, also="rope_theta"
            ),
        ),
        without=("head_dim", "rope_theta"),
        # The scaling of "dynamic" begins beyond max_position_embeddings.
        fixed={"rotary.type": ("dynamic", "origin")},
        ignored=("rotary.scaling_factor",),
    )
    manifest = family_manifest(family, "InternLM", source="github.com/InternLM/InternLM")
