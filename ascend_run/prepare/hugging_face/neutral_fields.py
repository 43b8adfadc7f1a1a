"""Fields of ``[model]`` that a family does not map, with their neutral values.

Megatron can build more than a Hugging Face class can read. On export every field below that the
family does not map must be neutral, or transformers would load a model that computes something
else. Torch-free.
"""

from __future__ import annotations

from typing import Final

NEUTRAL: Final[dict[str, object]] = {
    "activation_func_clamp_value": None,
    "add_qkv_bias": False,
    "apply_residual_connection_post_layernorm": False,
    "attention_output_gate": False,
    "attn_logit_softcapping": None,
    "embedding_layernorm": False,
    "embedding_multiplier": 1.0,
    "experimental_attention_variant": None,
    "final_logit_softcapping": None,
    "glu_linear_offset": 0.0,
    "heterogeneous_block_specs": False,
    "is_hybrid_model": False,
    "layernorm_zero_centered_gamma": False,
    "linear_attention_freq": None,
    "log_n_scaling_length": None,
    "logits_scaling": 1.0,
    "moe_apply_probs_on_input": False,
    "moe_expert_capacity_factor": None,
    "moe_latent_size": None,
    "moe_layer_freq": 1,
    "moe_router_enable_expert_bias": False,
    "moe_router_force_load_balancing": False,
    "moe_router_group_topk": None,
    "moe_router_num_groups": None,
    "moe_router_topk_limited_devices": None,
    "moe_router_topk_scaling_factor": None,
    "moe_shared_expert_intermediate_size": None,
    "mrope_section": None,
    "mtp_num_layers": None,
    "multi_latent_attention": False,
    "no_rope_freq": None,
    "norm_placement": "pre",
    "normalize_output_rows": False,
    "num_moe_experts": None,
    "qk_l2_norm": False,
    "qk_layernorm": False,
    "residual_multiplier": 1.0,
    "rope_scaling_type": None,
    "rotary_interleaved": False,
    "rotary_local_base": None,
    "scale_embedding": False,
    "softmax_scale": None,
    "softmax_type": "vanilla",
    "window_attn_skip_freq": None,
    "window_size": None,
}
"""Maps a ``[model]`` field to the value at which it does not affect a trained model."""

TRAINING_ONLY: Final = frozenset(
    {
        "model.hidden_dropout",
        "model.moe_aux_loss_coeff",
        "model.moe_router_load_balancing_type",
        "model.moe_token_dispatcher_type",
    }
)
"""Family defaults that may differ on export.

They affect how a model is trained or computed, but not its result.
"""
