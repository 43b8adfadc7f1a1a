"""Megatron's fields that cannot be set here, with a reason for each: data.

A field may always keep Megatron's default. A field is rejected at other values if it would be
ignored, or needs a library that this runtime does not use. ``scripts/field_readers.py`` lists the
readers of the other fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ascend_run.core.config.megatron_fields import MegatronField
from ascend_run.plugin_api.error_text import show

_PRECISION: Final = "it follows train.precision; set that"
_ENGINE: Final = "it needs Transformer Engine, which is not used here"
_LOW_PRECISION: Final = "fp8 and fp4 are not supported yet; set train.precision"
_RUNTIME: Final = "the runtime sets it"

NEVER: Final[Mapping[str, str]] = {
    "activation_func": "it is a function; set model.activation",
    "attention_backend": "the attention kernel is a plugin's; see: ascend-run plugins",
    "autocast_dtype": _PRECISION,
    "bf16": _PRECISION,
    "calculate_per_token_loss": _RUNTIME,
    "embedding_init_method": "it is a function; set model.embedding_init_method_std",
    "enable_autocast": _PRECISION,
    "fp16": _PRECISION,
    "init_method": "it is a function; set model.init_method_std",
    "output_layer_init_method": "it is a function; set model.init_method_std",
    "params_dtype": _PRECISION,
    "pipeline_dtype": _PRECISION,
}
"""Rejected at any value."""

_DEFAULT_ONLY: Final[Mapping[str, str]] = {
    "it is not supported yet": """
        apply_query_key_layer_scaling attention_output_gate experimental_attention_variant
        heterogeneous_block_specs log_max_attention_logit moe_apply_probs_on_input no_rope_freq
        num_microbatches_with_partial_activation_checkpoints overlap_moe_expert_parallel_comm
        overlap_p2p_comm_warmup_flush qk_clip
    """,
    "it needs model.overlap_moe_expert_parallel_comm, which is not supported yet": """
        ep_overlap_early_attn_memory_release
    """,
    "it needs model.qk_clip, which is not supported yet": "qk_clip_alpha qk_clip_threshold",
    "DeepSeek's sparse attention is not supported yet": """
        dsa_indexer_head_dim dsa_indexer_loss_coeff dsa_indexer_n_heads dsa_indexer_topk
        dsa_indexer_use_sparse_loss
    """,
    "linear attention is not supported yet": """
        linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads
        linear_num_value_heads linear_value_head_dim
    """,
    "Mamba layers are not supported yet": """
        is_hybrid_model mamba_head_dim mamba_num_groups mamba_num_heads mamba_state_dim
        use_mamba_mem_eff_path
    """,
    "positions along several axes are not supported yet; set model.position_embedding_type": """
        mrope_section
    """,
    "CUDA graphs are not supported yet": """
        cuda_graph_impl cuda_graph_retain_backward_graph cuda_graph_scope
        cuda_graph_use_single_mempool cuda_graph_warmup_steps enable_cuda_graph external_cuda_graph
    """,
    _LOW_PRECISION: """
        activation_func_fp8_input_store first_last_layers_bf16 moe_router_padding_for_fp8
        moe_router_padding_for_quantization num_layers_at_end_in_bf16 num_layers_at_start_in_bf16
        tp_only_amax_red
    """,
    _ENGINE: """
        apply_rope_fusion batch_invariant_mode delay_wgrad_compute disable_parameter_transpose_cache
        fused_single_qkv_rope moe_latent_size moe_permute_fusion moe_router_fusion symmetric_ar_type
        use_te_rng_tracker
    """,
    f"{_ENGINE}; to offload activations, use a plugin; see: ascend-run plugins": """
        cpu_offloading cpu_offloading_activations cpu_offloading_double_buffering
        cpu_offloading_num_layers cpu_offloading_weights fine_grained_activation_offloading
        min_offloaded_tensor_size offload_modules
    """,
    f"{_ENGINE}; to overlap the linears' collectives, use a plugin; see: ascend-run plugins": """
        tp_comm_atomic_ag tp_comm_atomic_rs tp_comm_bootstrap_backend tp_comm_bulk_dgrad
        tp_comm_bulk_wgrad tp_comm_overlap tp_comm_overlap_ag tp_comm_overlap_disable_fc1
        tp_comm_overlap_disable_qkv tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag
        tp_comm_split_rs
    """,
    "it needs APEX, which is not used here": """
        defer_embedding_wgrad_compute gradient_accumulation_fusion memory_efficient_layer_norm
        persist_layer_norm wgrad_deferral_limit
    """,
    "DeepEP and HybridEP are not used here": """
        moe_deepep_num_sms moe_enable_deepep moe_flex_dispatcher_backend moe_hybridep_num_sms
    """,
    "it needs kitchen, which is not used here": """
        kitchen_attention_backend use_kitchen use_kitchen_attention
    """,
    "it needs a patched torch, which is not used here": "use_ring_exchange_p2p",
    "it is for inference": """
        cache_mla_latents flash_decode inference_fuse_tp_communication inference_rng_tracker
        inference_sampling_seed mlp_chunks_for_prefill use_inference_optimized_layers
    """,
    "Megatron ignores it": """
        apply_residual_connection_post_layernorm async_tensor_model_parallel_allreduce
        moe_extended_tp moe_layer_recompute
    """,
    "set model.moe_router_num_groups and model.moe_router_group_topk in its place": """
        moe_router_topk_limited_devices
    """,
    "Megatron does not support it": "moe_token_dropping",
    "every attention kernel computes softmax in float32 or wider": "attention_softmax_in_fp32",
    "the attention kernel is a plugin's; see: ascend-run plugins": "masked_softmax_fusion",
    "the loss is always fused with the output layer": "cross_entropy_loss_fusion",
    "grouped experts are a plugin's; see: ascend-run plugins": """
        moe_grouped_gemm moe_use_legacy_grouped_gemm
    """,
    "context parallelism is a plugin's; see: ascend-run plugins": """
        cp_comm_type hierarchical_context_parallel_sizes hybrid_context_parallel
        max_seqlen_per_dp_cp_rank
    """,
    "the platform's fused activation is used automatically": """
        bias_activation_fusion use_fused_weighted_squared_relu use_te_activation_func
    """,
    "the built-in initialization is used": """
        init_model_with_meta_device perform_initialization use_cpu_initialization
    """,
    "the model is built from our own modules": "test_mode transformer_impl",
    "process groups have the platform's backend": "pipeline_model_parallel_comm_backend",
    "the built-in checkpoints store each layer under its own key": "hetereogenous_dist_checkpoint",
    "a run's folder has its config, and metrics.jsonl its losses": "config_logger_dir",
    "Megatron's timers and logs are not used here; see: ascend-run report": """
        barrier_with_L1_time moe_per_layer_logging
    """,
    "it is a process-wide setting of CUDA, which Megatron does not restore": """
        disable_bf16_reduced_precision_matmul
    """,
    _RUNTIME: "mtp_standalone",
}
"""Maps a reason to the fields that are rejected at any value but the default."""
DEFAULT_ONLY: Final[Mapping[str, str]] = {
    name: why for why, names in _DEFAULT_ONLY.items() for name in names.split()
}
"""Maps a field to the reason why it is rejected at any value but the default."""

_LOW_PRECISION_PREFIXES: Final = ("fp8", "fp4")

CHOICES: Final[Mapping[str, tuple[tuple[object, ...], str]]] = {
    "cross_entropy_fusion_impl": (("native",), _ENGINE),
    "moe_token_dispatcher_type": (("allgather", "alltoall"), "'flex' needs DeepEP"),
    "rope_type": (("rope", "yarn"), "Megatron supports 'rope' and 'yarn' only"),
}
"""Maps a field to its supported values and the reason why others are not."""


def refusal(field: MegatronField, value: Any) -> str | None:
    """Return why a field cannot have a value, or None."""
    if field.name in CHOICES:
        supported, why = CHOICES[field.name]
        return None if value in supported else f"{why}, not {show(value)}"
    is_settable = field.type is not None and field.name not in NEVER
    return None if is_settable and value == field.default else refused_because(field)


def refused_because(field: MegatronField) -> str | None:
    """Return why a field has one valid value only or cannot be set; None if configurable."""
    if field.type is None or field.name in NEVER:
        return NEVER.get(field.name, "it is a Python object, which a config cannot hold")
    if field.name.startswith(_LOW_PRECISION_PREFIXES):
        return _LOW_PRECISION
    if field.name in CHOICES:
        supported, why = CHOICES[field.name]
        return why if len(supported) == 1 else None
    return DEFAULT_ONLY.get(field.name)


OWN_DEFAULTS: Final[Mapping[str, object]] = {
    "expert_tensor_parallel_size": 1,
    "moe_token_dispatcher_type": "alltoall",
    "q_lora_rank": None,
    "rope_type": "rope",
}
"""Defaults that differ from Megatron's.

An expert is small, so it is not sharded by default; the dispatcher is the one with the lowest
communication volume that needs no further library; latent queries and yarn are off.
"""
