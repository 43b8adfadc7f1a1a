"""Qwen1.5-MoE and Qwen2 57B-A14B: experts beside a gated shared one."""

from __future__ import annotations

from ascend_run.families import (
    DECODER,
    EXPERT_DEFAULTS,
    SPARSE,
    FamilyPlugin,
    derived,
    expert_tensors,
    family_manifest,
    optional_window,
    shared_expert_tensors,
)
from ascend_run.plugin_api import ConfigKey


class Qwen2Moe(FamilyPlugin):
    """Hugging Face's ``qwen2_moe``."""

    family = derived(
        DECODER,
        model_type="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        defaults={
            **EXPERT_DEFAULTS,
            "model.add_qkv_bias": True,
            "model.layernorm_epsilon": 1e-6,
            "model.moe_router_pre_softmax": True,
            "model.moe_shared_expert_gate": True,
        },
        keys=(
            *optional_window("window_below"),
            ConfigKey(hf="moe_intermediate_size", field="model.moe_ffn_hidden_size", default=1408),
            ConfigKey(
                hf="shared_expert_intermediate_size",
                field="model.moe_shared_expert_intermediate_size",
                default=5632,
            ),
            ConfigKey(hf="num_experts", field="model.num_moe_experts", default=60),
            ConfigKey(hf="num_experts_per_tok", field="model.moe_router_topk", default=4),
            ConfigKey(hf="router_aux_loss_coef", field="model.moe_aux_loss_coeff", default=0.001),
            ConfigKey(hf="qkv_bias", field="model.add_qkv_bias", default=True),
            ConfigKey(
                hf="norm_topk_prob",
                field="model.moe_router_pre_softmax",
                default=False,
                form="negation",
            ),
        ),
        key_defaults={"max_position_embeddings": 32768, "num_key_value_heads": 16},
        fixed={"decoder_sparse_step": 1, "mlp_only_layers": ([], None)},
        ignored=("output_router_logits",),
        without=("mlp.",),
        tensors=(*expert_tensors(), *shared_expert_tensors()),
    )
    manifest = family_manifest(family, "Qwen2-MoE", source="arXiv:2407.10671", requires=(SPARSE,))
