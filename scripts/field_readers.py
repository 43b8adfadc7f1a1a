"""The module that reads each configurable Megatron field: data.

A field that is read only by Megatron modules that ours replace would have no effect; such fields
are in ``unsupported``. Tests run tiny models and check that each module reads its fields, and that
each field of the installed Megatron is in exactly one of the two tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_READERS: Final[Mapping[str, str]] = {
    "ascend_run.plugin_api.expert_layers": "moe_layer_freq num_moe_experts",
    "ascend_run.core.config.layout": """
        context_parallel_size expert_model_parallel_size expert_tensor_parallel_size
        tensor_model_parallel_size
    """,
    "ascend_run.core.config.latent_attention": "mscale_all_dim",
    "ascend_run.core.model.attention": """
        attention_dropout rotary_interleaved softmax_type
    """,
    "ascend_run.plugin_api.layer_window": "window_attn_skip_freq window_size",
    "ascend_run.core.model.experts": """
        activation_func_clamp_value glu_linear_offset moe_ffn_hidden_size
    """,
    "ascend_run.core.model.initialization": "embedding_init_method_std init_method_std",
    "ascend_run.core.model.latent_attention": """
        kv_lora_rank q_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
    """,
    "ascend_run.core.model.gpt": "mtp_loss_scaling_factor",
    "ascend_run.core.model.mtp": "mtp_num_layers",
    "ascend_run.core.model.norm": "layernorm_zero_centered_gamma normalization",
    "ascend_run.core.model.rotary_scaling": """
        beta_fast beta_slow mscale original_max_position_embeddings rope_type rotary_scaling_factor
    """,
    "ascend_run.core.model.router": """
        moe_aux_loss_coeff moe_expert_capacity_factor moe_input_jitter_eps
        moe_pad_expert_input_to_capacity moe_router_dtype moe_router_enable_expert_bias
        moe_router_force_load_balancing moe_router_group_topk moe_router_load_balancing_type
        moe_router_num_groups moe_router_pre_softmax moe_router_score_function moe_router_topk
        moe_router_topk_scaling_factor moe_token_drop_policy moe_z_loss_coeff
    """,
    "ascend_run.core.model.spec": """
        fp32_residual_connection multi_latent_attention qk_l2_norm qk_layernorm
    """,
    "megatron.core.distributed.finalize_model_grads": "moe_router_bias_update_rate",
    "megatron.core.models.common.embeddings.language_model_embedding": """
        clone_scatter_output_in_embedding
    """,
    "megatron.core.pipeline_parallel.p2p_communication": """
        batch_p2p_comm batch_p2p_sync variable_seq_lengths
    """,
    "megatron.core.pipeline_parallel.schedules": """
        deallocate_pipeline_outputs microbatch_group_size_per_vp_stage overlap_p2p_comm
    """,
    "megatron.core.tensor_parallel.layers": "deterministic_mode sequence_parallel",
    "megatron.core.transformer.attention": """
        add_qkv_bias kv_channels num_attention_heads num_query_groups softmax_scale
    """,
    "megatron.core.transformer.mlp": "add_bias_linear ffn_hidden_size gated_linear_unit",
    "megatron.core.transformer.moe.moe_layer": """
        moe_shared_expert_gate moe_shared_expert_intermediate_size moe_shared_expert_overlap
        moe_token_dispatcher_type
    """,
    "megatron.core.transformer.moe.router": "moe_enable_routing_replay",
    "megatron.core.transformer.transformer_block": """
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
        distribute_saved_activations hidden_size layernorm_epsilon num_layers
        num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
        pipeline_model_parallel_layout pipeline_model_parallel_size recompute_granularity
        recompute_method recompute_modules recompute_num_layers virtual_pipeline_model_parallel_size
    """,
    "megatron.core.transformer.transformer_layer": "bias_dropout_fusion hidden_dropout",
}
"""Maps a module to the fields that it, possibly among others, reads."""
READERS: Final[Mapping[str, str]] = {
    name: module for module, names in _READERS.items() for name in names.split()
}
"""Maps a field to the module that reads it."""
