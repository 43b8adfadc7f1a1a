"""Bounds of Megatron's fields that its source states only in prose."""

from __future__ import annotations

from typing import Final

_POSITIVE: Final = """
    activation_func_clamp_value beta_fast beta_slow context_parallel_size
    expert_model_parallel_size expert_tensor_parallel_size ffn_hidden_size hidden_size kv_channels
    kv_lora_rank layernorm_epsilon moe_ffn_hidden_size moe_router_topk
    moe_shared_expert_intermediate_size num_attention_heads num_layers num_moe_experts
    num_query_groups original_max_position_embeddings pipeline_model_parallel_size q_lora_rank
    qk_head_dim qk_pos_emb_head_dim recompute_num_layers rotary_scaling_factor softmax_scale
    tensor_model_parallel_size v_head_dim virtual_pipeline_model_parallel_size vocab_size
"""
POSITIVE: Final = frozenset(_POSITIVE.split())
REQUIRED: Final = (
    "model.num_layers",
    "model.hidden_size",
    "model.num_attention_heads",
    "model.vocab_size",
)
"""Options without a meaningful default."""

_SIGNED: Final = frozenset({"glu_linear_offset", "window_size"})
_PROBABILITIES: Final = frozenset({"attention_dropout", "hidden_dropout"})

LARGEST_COUNTS: Final = {"num_layers": 10_000, "num_moe_experts": 100_000, "mtp_num_layers": 1000}
"""Largest counts of what is planned one by one: far above any model, and below what ends a run."""


def bound_problem(name: str, value: object) -> str | None:
    """Return the bound that a number violates, such as ``must be above 0``, or None."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    if value > (most := LARGEST_COUNTS.get(name, value)):
        return f"must be at most {most}"
    if name in POSITIVE:
        return None if value > 0 else "must be above 0"
    if name in _PROBABILITIES:
        return None if 0 <= value < 1 else "must be at least 0 and below 1"
    return None if value >= 0 or name in _SIGNED else "must not be negative"
