"""MiniCPM3: a dense decoder with multi-latent attention and MiniCPM's factors."""

from __future__ import annotations

from ascend_run.families import (
    DECODER,
    DENSE,
    FamilyPlugin,
    derived,
    family_manifest,
    forms,
    latent_keys,
    latent_tensors,
    mlp_bias,
    needs_latent_attention,
    scaling_factors,
)
from ascend_run.plugin_api import ConfigKey


class MiniCPM3(FamilyPlugin):
    """Hugging Face's ``minicpm3``."""

    family = derived(
        DECODER,
        model_type="minicpm3",
        architecture="MiniCPM3ForCausalLM",
        defaults={
            "model.multi_latent_attention": True,
            "model.qk_layernorm": True,  # of the latents
            "model.latent_layernorm_epsilon": 1e-6,  # whatever that of the other norms
            "model.latent_rotary_interleaved": False,
            "model.share_embeddings_and_output_weights": True,
        },
        keys=(
            *latent_keys(768, 256, plain=64, rotated=32),
            *mlp_bias(),
            ConfigKey(
                hf="v_head_dim", field="model.v_head_dim", default=None, form=forms.HEAD_WIDTH
            ),
            *scaling_factors(12.0, 1.4, 256),
        ),
        key_defaults={
            "num_key_value_heads": 40,
            "max_position_embeddings": 32768,
            "initializer_range": 0.1,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
        fixed={"attention_bias": False},
        ignored=("head_dim", "qk_head_dim", "pretraining_tp"),  # the first two: sums of the widths
        without=("self_attention.",),
        tensors=latent_tensors(),
    )
    manifest = family_manifest(
        family,
        "MiniCPM3",
        source="arXiv:2404.06395; arXiv:2405.04434 (attention)",
        requires=(DENSE, needs_latent_attention("MiniCPM3", "minicpm")),
    )
