"""MiniCPM-MoE 8x2B: MiniCPM whose MLPs are experts."""

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
    scaling_factors,
)
from ascend_run.plugin_api import ConfigKey


class MiniCPMMoE(FamilyPlugin):
    """The authors' ``minicpm`` with experts; by ``model.family`` only."""

    family = derived(
        DECODER,
        model_type="minicpm",
        architecture="MiniCPMForCausalLM",
        defaults={
            "model.share_embeddings_and_output_weights": True,
            # A softmax over the selected logits equals one over all logits whose selected weights
            # are normalized to a sum of 1.
            **EXPERT_DEFAULTS,
            "model.moe_router_pre_softmax": False,
        },
        keys=(
            *attention_bias(),
            *scaling_factors(1.0, 1.0, 1),
            ConfigKey(hf="intermediate_size", field="model.moe_ffn_hidden_size"),
            ConfigKey(hf="num_experts", field="model.num_moe_experts"),
            ConfigKey(hf="num_experts_per_tok", field="model.moe_router_topk", default=2),
        ),
        key_defaults={"tie_word_embeddings": True},
        without=("head_dim", "mlp."),
        ignored=("pretraining_tp",),
        tensors=expert_tensors("mlp", ("w1", "w3", "w2")),
    )
    manifest = family_manifest(
        family, "MiniCPM-MoE", name="minicpm_moe", source="arXiv:2404.06395", requires=(SPARSE,)
    )
