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
    normalized_topk,
    optional_window,
    router_keys,
    shared_expert_tensors,
)
from ascend_run.families.windows import WINDOW_BELOW
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
            *optional_window(WINDOW_BELOW),
            ConfigKey(hf="moe_intermediate_size", field="model.moe_ffn_hidden_size", default=1408),
            ConfigKey(
                hf="shared_expert_intermediate_size",
                field="model.moe_shared_expert_intermediate_size",
                default=5632,
            ),
            *router_keys("num_experts", experts=60, topk=4),
            ConfigKey(hf="qkv_bias", field="model.add_qkv_bias", default=True),
            *normalized_topk(),
        ),
        key_defaults={"max_position_embeddings": 32768, "num_key_value_heads": 16},
        fixed={"decoder_sparse_step": 1, "mlp_only_layers": ([], None)},
        ignored=("output_router_logits",),
        without=("mlp.",),
        tensors=(*expert_tensors(), *shared_expert_tensors()),
    )
    manifest = family_manifest(family, "Qwen2-MoE", source="arXiv:2407.10671", requires=(SPARSE,))
