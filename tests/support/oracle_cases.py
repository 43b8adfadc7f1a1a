"""Tiny models with the options that the oracle has formulas for, off their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from tests.support.latent_models import LATENT

_BIASES: Final = {
    "model.normalization": "LayerNorm",
    "model.add_bias_linear": True,
    "model.activation": "gelu_tanh",
    "model.gated_linear_unit": False,
}


@attrs.frozen(kw_only=True)
class OracleCase:
    """A plain run."""

    model: str = "dense"
    """Key of ``testing.models.MODELS``."""
    enable: tuple[str, ...] = ()
    config: Mapping[str, Any] = attrs.field(factory=dict)


CASES: Final[Mapping[str, OracleCase]] = {
    "dense": OracleCase(),
    "moe": OracleCase(model="moe"),
    "latent moe": OracleCase(
        model="moe",
        config={
            **LATENT,
            "model.num_layers": 3,
            "model.moe_layer_freq": [0, 1, 1],
            "model.num_moe_experts": 8,
            "model.moe_router_score_function": "sigmoid",
            "model.moe_router_num_groups": 4,
            "model.moe_router_group_topk": 2,
            "model.moe_router_topk": 3,
            "model.moe_router_topk_scaling_factor": 1.5,
            "model.moe_router_enable_expert_bias": True,
            "model.moe_router_bias_update_rate": 0.01,
            "model.moe_z_loss_coeff": 0.01,
            "model.moe_router_load_balancing_type": "seq_aux_loss",
            "model.moe_aux_loss_coeff": 0.02,
            "model.moe_shared_expert_gate": True,
            "model.mtp_num_layers": 2,
            "model.mtp_loss_scaling_factor": 0.3,
            "model.log_n_scaling_length": 4,
            "train.micro_batch_size": 2,
        },
    ),
    "many switches": OracleCase(
        enable=("eod-reset", "lora"),
        config={
            **_BIASES,
            "model.kv_channels": 6,
            "model.position_embedding_type": "learned_absolute",
            "model.share_embeddings_and_output_weights": True,
            "model.normalize_output_rows": True,
            "model.norm_placement": "both",
            "model.layernorm_zero_centered_gamma": True,
            "model.qk_layernorm": True,
            "model.softmax_type": "learnable",
            "model.softmax_scale": 0.3,
            "model.attn_logit_softcapping": 2.0,
            "model.final_logit_softcapping": 3.0,
            "model.window_size": [5, 0],
            "model.window_attn_skip_freq": 2,
            "model.embedding_layernorm": True,
            "model.scale_embedding": True,
            "model.embedding_multiplier": 0.5,
            "model.residual_multiplier": 0.7,
            "model.logits_scaling": 1.5,
            "train.micro_batch_size": 2,
            "plugins.eod-reset.eod_token_id": 3,
            "plugins.lora.rank": 3,
            "plugins.lora.rslora": True,
            "plugins.lora.dora": True,
            "plugins.lora.rank_pattern": {"linear_k": 2},
            "plugins.lora.alpha_pattern": {"linear_qkv": 5.0, "linear_v": 3.0},
            "plugins.lora.target_modules": ["linear_qkv", "linear_fc2"],
            "plugins.lora.modules_to_save": ["word_embeddings", "q_layernorm", "final_layernorm"],
            "optimizer.clip_grad": 0.1,
            "optimizer.lr_decay_style": "linear",
        },
    ),
    "adapters of shared experts": OracleCase(
        enable=("lora",),
        model="moe",
        config={
            "model.moe_shared_expert_intermediate_size": 24,
            "model.moe_shared_expert_gate": True,
            "plugins.lora.rank": 3,
            "plugins.lora.dora": True,
            "plugins.lora.rank_pattern": {"shared_experts": 2, "linear_fc1_up": 4},
            "plugins.lora.alpha_pattern": {"linear_fc2": 5.0, "shared_experts_fc1_up": 3.0},
            "plugins.lora.target_modules": ["linear_fc1", "shared_experts_fc2", "linear_k"],
        },
    ),
    "no positions": OracleCase(
        enable=("alibi", "eod-reset", "noop-layers"),
        config={
            **_BIASES,
            "model.num_layers": 3,
            "model.position_embedding_type": "none",
            "model.softmax_type": "off-by-one",
            "model.qk_l2_norm": True,
            "model.norm_placement": "post",
            "model.add_mlp_bias": False,
            "plugins.alibi.distance": "root",
            "plugins.noop-layers.layers": [1],
            "plugins.eod-reset.document_length": 5,
            "plugins.eod-reset.eod_token_id": None,
            "optimizer.weight_decay": 0.5,
            "optimizer.lr_decay_style": "WSD",
            "optimizer.lr_wsd_decay_iters": 2,
            "train.train_iters": 4,
        },
    ),
    "expert biases": OracleCase(
        model="moe",
        config={
            "model.num_layers": 3,
            "model.moe_layer_freq": [1, 0, 1],
            "model.add_bias_linear": True,
            "model.add_linear_proj_bias": False,
            "model.add_output_bias": True,
            "model.share_embeddings_and_output_weights": True,
            "model.activation": "quick_gelu",
            "model.quick_gelu_alpha": 1.5,
            "model.activation_func_clamp_value": 0.3,
            "model.glu_linear_offset": 1.0,
            "model.moe_sparsemixer_eps": 0.2,
            "model.init_method_std": 0.2,
        },
    ),
    "sinkhorn": OracleCase(
        model="moe",
        enable=("ema-adamw", "shared-experts"),
        config={
            "plugins.shared-experts.count": 2,
            "plugins.shared-experts.gate": True,
            "model.moe_router_load_balancing_type": "sinkhorn",
            "model.moe_aux_loss_coeff": 0.0,
            "model.moe_router_pre_softmax": True,
            "model.init_method_std": 0.2,
        },
    ),
    "rotations": OracleCase(
        model="moe",
        config={
            "model.rotary_interleaved": True,
            "model.rotary_percent": 0.5,
            "model.kv_channels": 8,
            "model.rope_scaling_type": "dynamic",
            "model.rope_scaling_factor": 2.0,
            "model.max_position_embeddings": 8,
            "model.window_size": [3, 0],
            "model.window_attn_skip_freq": 2,
            "model.rotary_local_base": 30.0,
            "model.moe_router_pre_softmax": True,
            "model.activation": "squared_relu",
        },
    ),
}
"""Name -> a case. Together they move every option that the oracle reads, but those of scalings of
rotary positions and of fine-tuning data, which have tests of their own."""

DROPPING: Final[Mapping[str, OracleCase]] = {
    "by weight": OracleCase(
        model="moe",
        config={
            "model.add_expert_bias": True,
            "model.moe_expert_capacity_factor": 0.8,
            "model.moe_pad_expert_input_to_capacity": True,
            "model.init_method_std": 0.2,
            "train.micro_batch_size": 2,
        },
    ),
    "by position": OracleCase(
        model="moe",
        config={
            "model.moe_router_score_function": "sigmoid",
            "model.moe_router_enable_expert_bias": True,
            "model.moe_expert_capacity_factor": 0.8,
            "model.moe_token_drop_policy": "position",
            "train.micro_batch_size": 2,
        },
    ),
}
"""Experts that drop tokens."""
