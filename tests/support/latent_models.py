"""A tiny model with multi-latent attention: a dense layer, then one with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ascend_run.testing.models import MOE

LATENT: Final[Mapping[str, Any]] = {
    "model.family": "deepseek_v2",
    "model.num_query_groups": None,
    "model.q_lora_rank": 12,
    "model.kv_lora_rank": 10,
    "model.qk_head_dim": 6,
    "model.qk_pos_emb_head_dim": 4,
    "model.v_head_dim": 7,
    "model.rope_type": "yarn",
    "model.rotary_scaling_factor": 4.0,
    "model.original_max_position_embeddings": 8,
    "model.beta_fast": 2.0,
    "model.mscale": 0.9,
    "model.mscale_all_dim": 0.7,
    "model.moe_layer_freq": [0, 1],
    "model.moe_shared_expert_intermediate_size": 32,
}
"""Changes to ``testing.models.MOE``."""
MODEL: Final[Mapping[str, Any]] = {**MOE, **LATENT}
DENSE: Final[Mapping[str, Any]] = {
    **{name: value for name, value in MODEL.items() if not name.startswith("model.moe_")},
    "model.num_moe_experts": None,
    "model.q_lora_rank": None,
    "model.rope_type": "rope",
    "model.rotary_scaling_factor": 40.0,
    "model.original_max_position_embeddings": 4096,
    "model.beta_fast": 32.0,
    "model.mscale": 1.0,
    "model.mscale_all_dim": 0.0,
    "model.v_head_dim": 10,
}
"""Without experts, with uncompressed queries and values as wide as keys."""
