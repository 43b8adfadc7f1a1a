"""InternLM2 and InternLM2.5: q, k and v packed by key-value group."""

from __future__ import annotations

from ascend_run.families import (
    DECODER,
    FamilyPlugin,
    attention_bias,
    derived,
    family_manifest,
    fused_qkv,
)


class InternLM2(FamilyPlugin):
    """The authors' ``internlm2``."""

    family = derived(
        DECODER,
        model_type="internlm2",
        architecture="InternLM2ForCausalLM",
        keys=attention_bias("bias"),
        without=("head_dim",),
        ignored=("attn_implementation", "pretraining_tp"),
        tensors=fused_qkv("attention.wqkv", form="copy"),
        names={
            "model.embed_tokens.": "model.tok_embeddings.",
            "lm_head.": "output.",
            ".input_layernorm.": ".attention_norm.",
            ".post_attention_layernorm.": ".ffn_norm.",
            ".self_attn.o_proj.": ".attention.wo.",
            ".mlp.gate_proj.": ".feed_forward.w1.",
            ".mlp.up_proj.": ".feed_forward.w3.",
            ".mlp.down_proj.": ".feed_forward.w2.",
        },
    )
    manifest = family_manifest(family, "InternLM2", source="arXiv:2403.17297")
