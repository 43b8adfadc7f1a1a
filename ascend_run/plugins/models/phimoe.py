"""Phi-3.5-MoE: SparseMixer's router, LayerNorm, biases of attention and output layer, longrope.

Experts are selected as in evaluation, in training, too, with the gradient of the selected ones'
softmax. ``model.moe_sparsemixer_sampling`` draws them from it in training, as the authors do. Their
noise on the input of a layer's router and experts (``input_jitter_noise``) is left out;
``model.moe_input_jitter_eps`` is of the router's input alone.
"""

from __future__ import annotations

from ascend_run.families import (
    DECODER,
    EXPERT_DEFAULTS,
    SPARSE,
    FamilyPlugin,
    attention_bias,
    derived,
    expert_tensors,
    family_manifest,
    forms,
    sliding_window,
)
from ascend_run.plugin_api import ConfigKey


class Phimoe(FamilyPlugin):
    """Hugging Face's ``phimoe``."""

    family = derived(
        DECODER,
        model_type="phimoe",
        architecture="PhimoeForCausalLM",
        former_architectures=("PhiMoEForCausalLM",),
        rope_parameters=frozenset({"short_mscale", "long_mscale"}),
        defaults={
            "model.normalization": "LayerNorm",
            **EXPERT_DEFAULTS,
            "model.moe_router_pre_softmax": False,
            "model.moe_router_topk": 2,
            "model.moe_sparsemixer_eps": 0.01,
        },
        keys=(
            *attention_bias(),
            *sliding_window(None),
            ConfigKey(hf="lm_head_bias", field="model.add_output_bias", default=False),
            ConfigKey(hf="intermediate_size", field="model.moe_ffn_hidden_size"),
            ConfigKey(hf="num_local_experts", field="model.num_moe_experts", default=16),
            ConfigKey(hf="router_aux_loss_coef", field="model.moe_aux_loss_coeff", default=0.001),
            ConfigKey(hf="router_jitter_noise", field="model.moe_sparsemixer_eps", default=0.01),
            ConfigKey(
                hf="original_max_position_embeddings",
                field="model.rope_scaling_original_max_position_embeddings",
                default=4096,
                form=forms.LONGROPE_LENGTH,
            ),
        ),
        key_defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        fixed={"hidden_dropout": 0.0, "num_experts_per_tok": 2},
        ignored=("input_jitter_noise", "output_router_logits"),
        without=("mlp.",),
        tensors=expert_tensors("block_sparse_moe", ("w1", "w3", "w2")),
    )
    manifest = family_manifest(
        family, "Phi-3.5-MoE", source="arXiv:2404.14219, arXiv:2409.12136", requires=(SPARSE,)
    )
