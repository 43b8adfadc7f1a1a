"""MiniCPM: Llama with factors that keep width and depth scaling stable."""

from __future__ import annotations

from ascend_run.families import (
    DECODER,
    FamilyPlugin,
    attention_bias,
    derived,
    family_manifest,
    scaling_factors,
)


class MiniCPM(FamilyPlugin):
    """The authors' ``minicpm``."""

    family = derived(
        DECODER,
        model_type="minicpm",
        architecture="MiniCPMForCausalLM",
        defaults={"model.share_embeddings_and_output_weights": True},
        keys=(
            *attention_bias(),
            *scaling_factors(1.0, 1.0, 1),
        ),
        key_defaults={"tie_word_embeddings": True},
        without=("head_dim",),
        ignored=("pretraining_tp",),
    )
    manifest = family_manifest(family, "MiniCPM", source="arXiv:2404.06395")
