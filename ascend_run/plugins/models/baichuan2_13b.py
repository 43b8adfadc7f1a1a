"""Baichuan 2 13B: ALiBi, and normalized rows of the output layer."""

from __future__ import annotations

from ascend_run.families import DECODER, derived, family_manifest, fused_qkv
from ascend_run.plugin_api import ConfigKey
from ascend_run.plugins.models import ALIBI, AlibiFamilyPlugin


class Baichuan2Of13B(AlibiFamilyPlugin):
    """The authors' ``baichuan`` of the second generation, 13B; set ``model.family``."""

    family = derived(
        DECODER,
        model_type="baichuan",
        architecture="BaichuanForCausalLM",
        defaults={"model.position_embedding_type": "none", "model.normalize_output_rows": True},
        keys=(
            ConfigKey(hf="model_max_length", field="model.max_position_embeddings", default=4096),
        ),
        without=(
            "attention_dropout",
            "head_dim",
            "max_position_embeddings",
            "num_key_value_heads",
            "rope_theta",
        ),
        ignored=("_from_model_config", "gradient_checkpointing", "tokenizer_class"),
        fixed={"tie_word_embeddings": False, "z_loss_weight": 0},
        tensors=fused_qkv("self_attn.W_pack"),
    )
    manifest = family_manifest(
        family,
        "Baichuan 2 13B",
        name="baichuan2_13b",
        source="arXiv:2309.10305",
        attention_needs=ALIBI,
    )
