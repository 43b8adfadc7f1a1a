"""InternLM 1: Llama with biases on q, k, v and the output projection."""

from __future__ import annotations

from ascend_run.families import DECODER, FamilyPlugin, attention_bias, derived, family_manifest


class InternLM(FamilyPlugin):
    """The authors' ``internlm``."""

    family = derived(
        DECODER,
        model_type="internlm",
        architecture="InternLMForCausalLM",
        defaults={"model.add_qkv_bias": True, "model.add_linear_proj_bias": True},
        keys=attention_bias("bias", default=True),
        without=("head_dim",),
        ignored=("rotary",),  # its scaling begins beyond max_position_embeddings
    )
    manifest = family_manifest(family, "InternLM", source="github.com/InternLM/InternLM")
