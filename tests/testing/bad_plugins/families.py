"""A model family that is right, and one that maps a tensor wrong."""

from __future__ import annotations

from typing import Any

import attrs

from ascend_run.families import DECODER, FamilyPlugin, derived, family_manifest, mlp_bias
from ascend_run.plugin_api import ConfigKey


def seed_oss() -> Any:
    """Seed-OSS of transformers: Llama with options for three kinds of biases."""
    return derived(
        DECODER,
        model_type="seed_oss",
        architecture="SeedOssForCausalLM",
        keys=(
            ConfigKey(hf="attention_bias", field="model.add_qkv_bias", default=True),
            ConfigKey(hf="attention_out_bias", field="model.add_linear_proj_bias", default=False),
            ConfigKey(hf="residual_dropout", field="model.hidden_dropout", default=0.1),
            *mlp_bias(),
        ),
        key_defaults={
            "max_position_embeddings": 524288,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_dropout": 0.1,
        },
        ignored=("pretraining_tp",),
    )


class SeedOss(FamilyPlugin):
    family = seed_oss()
    manifest = family_manifest(family, "Seed-OSS", source="its config.json")


class MapsABiasWrong(FamilyPlugin):
    """The rows of the biases of q, k and v one after the other, not interleaved by groups."""

    family = attrs.evolve(
        seed_oss(),
        tensors=tuple(
            attrs.evolve(tensor, form="concat")
            if tensor.megatron.endswith("linear_qkv.bias")
            else tensor
            for tensor in seed_oss().tensors
        ),
    )
    manifest = family_manifest(family, "Seed-OSS", source="its config.json")
