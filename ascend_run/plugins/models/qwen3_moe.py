"""Qwen3 with experts in every layer (30B-A3B, 235B-A22B)."""

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
    normalized_topk,
    optional_window,
    router_keys,
)
from ascend_run.plugin_api import ConfigKey


class Qwen3Moe(FamilyPlugin):
    """Hugging Face's ``qwen3_moe``."""

    family = derived(
        DECODER,
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        defaults={
            **EXPERT_DEFAULTS,
            "model.layernorm_epsilon": 1e-6,
            "model.moe_router_pre_softmax": True,
            "model.qk_layernorm": True,
        },
        keys=(
            *attention_bias(),
            *optional_window(None),
            ConfigKey(hf="moe_intermediate_size", field="model.moe_ffn_hidden_size", default=768),
            *router_keys("num_experts", experts=128, topk=8, also="num_local_experts"),
            *normalized_topk(),
        ),
        key_defaults={"max_position_embeddings": 32768, "num_key_value_heads": 4},
        fixed={"decoder_sparse_step": 1, "mlp_only_layers": ([], None)},
        ignored=("max_window_layers", "output_router_logits"),  # every layer has the window
        without=("mlp.",),
        tensors=expert_tensors(),
    )
    manifest = family_manifest(family, "Qwen3-MoE", source="arXiv:2505.09388", requires=(SPARSE,))
