"""Seed-OSS of transformers: Llama with options for three kinds of biases."""

from __future__ import annotations

from ascend_run.families import DECODER, FamilyPlugin, derived, family_manifest, mlp_bias
from ascend_run.plugin_api import ConfigKey


class SeedOss(FamilyPlugin):
    """A dense decoder. It has no options: what can be set of a model is in ``[model]``."""

    family = derived(
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
        # Parts of stored names -> what they are in this family.
        names={},
        ignored=("pretraining_tp",),
    )
    manifest = family_manifest(
        family, title="Seed-OSS", source="its config.json", requires_api=">=0,<1"
    )
