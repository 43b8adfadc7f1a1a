"""Fields of ``[model]`` that a family does not map, with their neutral values.

Megatron can build more than a Hugging Face class can read. On export every field below that the
family does not map must be neutral, or transformers would load a model that computes something
else. Torch-free.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Final

import attrs

from ascend_run.core.config.megatron_fields import megatron_fields
from ascend_run.prepare.config.model_keys import ModelKeys

_NEUTRAL_BY_DEFAULT: Final = """
    activation_func_clamp_value add_output_bias add_qkv_bias
    apply_residual_connection_post_layernorm attention_output_gate attn_logit_softcapping
    embedding_layernorm embedding_multiplier experimental_attention_variant final_logit_softcapping
    glu_linear_offset heterogeneous_block_specs is_hybrid_model latent_layernorm_epsilon
    latent_rotary_interleaved layernorm_zero_centered_gamma linear_attention_freq
    log_n_scaling_length logits_scaling moe_apply_probs_on_input moe_expert_capacity_factor
    moe_latent_size moe_layer_freq moe_router_enable_expert_bias moe_router_force_load_balancing
    moe_router_group_topk moe_router_num_groups moe_router_topk_limited_devices
    moe_router_topk_scaling_factor moe_shared_expert_intermediate_size moe_sparsemixer_eps
    mrope_section mtp_num_layers multi_latent_attention no_rope_freq norm_placement
    normalize_output_rows num_labels num_moe_experts qk_l2_norm qk_layernorm quick_gelu_alpha
    residual_multiplier rope_scaling_long_mscale rope_scaling_short_mscale rope_scaling_type
    rotary_interleaved rotary_local_base scale_embedding softmax_scale softmax_type
    window_attn_skip_freq window_size
"""


@functools.cache
def neutral_fields() -> Mapping[str, object]:
    """Map each field whose default has no effect on a trained model to that default."""
    own, of_megatron = attrs.fields_dict(ModelKeys), megatron_fields()
    fields = {name: own.get(name) or of_megatron.get(name) for name in _NEUTRAL_BY_DEFAULT.split()}
    return {name: field.default for name, field in fields.items() if field is not None}


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
