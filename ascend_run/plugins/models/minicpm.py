"""MiniCPM: Llama with factors that keep width and depth scaling stable."""

from __future__ import annotations

from ascend_run.families import DECODER, FamilyPlugin, attention_bias, derived, family_manifest
from ascend_run.plugin_api import ConfigKey


class MiniCPM(FamilyPlugin):
    """The authors' ``minicpm``."""

    family = derived(
        DECODER,
        model_type="minicpm",
        architecture="MiniCPMForCausalLM",
        defaults={"model.share_embeddings_and_output_weights": True},
        keys=(
            *attention_bias(),
            ConfigKey(hf="scale_emb", field="model.embedding_multiplier", default=1.0),
            ConfigKey(
                hf="scale_depth", field="model.residual_multiplier", default=1.0, form="over_depth"
            ),
            ConfigKey(
                hf="dim_model_base", field="model.logits_scaling", default=1, form="base_width"
            ),
        ),
        key_defaults={"tie_word_embeddings": True},
        without=("head_dim",),
        ignored=("pretraining_tp",),
    )
    manifest = family_manifest(family, "MiniCPM", source="arXiv:2404.06395")
