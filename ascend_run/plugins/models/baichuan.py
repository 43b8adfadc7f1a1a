"""Baichuan 7B: q, k and v packed into one tensor."""

from __future__ import annotations

from ascend_run.families import DECODER, FamilyPlugin, derived, family_manifest, fused_qkv


class Baichuan(FamilyPlugin):
    """The authors' ``baichuan`` with rotary positions."""

    family = derived(
        DECODER,
        model_type="baichuan",
        architecture="BaiChuanForCausalLM",
        key_defaults={"max_position_embeddings": 4096},
        without=("head_dim", "num_key_value_heads", "attention_dropout"),
        tensors=fused_qkv("self_attn.W_pack"),
    )
    manifest = family_manifest(family, "Baichuan", source="github.com/baichuan-inc/Baichuan-7B")
