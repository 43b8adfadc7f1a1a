"""Baichuan 2 7B: Baichuan with normalized rows of the output layer."""

from __future__ import annotations

from ascend_run.families import DECODER, FamilyPlugin, derived, family_manifest, fused_qkv


class Baichuan2(FamilyPlugin):
    """The authors' ``baichuan`` of the second generation, 7B; set ``model.family``."""

    family = derived(
        DECODER,
        model_type="baichuan",
        architecture="BaichuanForCausalLM",
        defaults={"model.normalize_output_rows": True},
        without=("attention_dropout", "head_dim", "num_key_value_heads"),
        ignored=(
            "_from_model_config",
            "gradient_checkpointing",
            "model_max_length",
            "tokenizer_class",
        ),
        fixed={"tie_word_embeddings": False, "z_loss_weight": 0},
        key_defaults={"max_position_embeddings": 4096},
        tensors=fused_qkv("self_attn.W_pack"),
    )
    manifest = family_manifest(family, "Baichuan 2", name="baichuan2", source="arXiv:2309.10305")
