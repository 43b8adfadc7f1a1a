"""Granite: Llama with factors on embeddings, attention, residual branches and logits."""

from __future__ import annotations

from ascend_run.families import (
    DECODER,
    FamilyPlugin,
    attention_bias,
    derived,
    family_manifest,
    forms,
    mlp_bias,
)
from ascend_run.plugin_api import ConfigKey


class Granite(FamilyPlugin):
    """Hugging Face's ``granite``."""

    family = derived(
        DECODER,
        model_type="granite",
        architecture="GraniteForCausalLM",
        keys=(
            *attention_bias(),
            *mlp_bias(),
            ConfigKey(hf="embedding_multiplier", field="model.embedding_multiplier", default=1.0),
            ConfigKey(hf="residual_multiplier", field="model.residual_multiplier", default=1.0),
            ConfigKey(hf="logits_scaling", field="model.logits_scaling", default=1.0),
            ConfigKey(
                hf="attention_multiplier",
                field="model.softmax_scale",
                default=1.0,
                form=forms.SOFTMAX_SCALE,
            ),
        ),
        without=("head_dim",),
    )
    manifest = family_manifest(family, "Granite", source="transformers/models/granite")
