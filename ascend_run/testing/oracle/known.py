"""What the oracle has no formula for, by name. Imports no torch.

Every field of ``[model]`` is read by the oracle, or is in one of the two tables here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ascend_run.types.config import RunConfig

PLUGINS: Final = frozenset(
    {"alibi", "ema-adamw", "eod-reset", "lora", "muon", "noop-layers", "shared-experts"}
)
"""Features that change the model by design and that the oracle has formulas for."""
TASKS: Final = frozenset({"pretrain", "sft"})
ALIBI_FAMILIES: Final = ("baichuan_13b", "baichuan2_13b", "bloom")
"""Model families with ALiBi; any other has it with the plugin ``alibi``."""

_NO_EFFECT: Final = """
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
    num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
    pipeline_model_parallel_layout
    family hf_path make_vocab_size_divisible_by
    init_method_std embedding_init_method_std
    distribute_saved_activations recompute_granularity recompute_method recompute_modules
    recompute_num_layers
    attention_softmax_in_fp32 fp32_residual_connection moe_router_dtype
    bias_dropout_fusion clone_scatter_output_in_embedding
    moe_shared_expert_overlap moe_token_dispatcher_type
"""
"""They say where layers and tensors are, how the weights that the oracle is given were made, what
is recomputed, which dtype is at least used, or by which of several equal ways something is done."""

_UNKNOWN: Final[tuple[tuple[object, str], ...]] = (
    (
        None,
        """
        cp_comm_type dsa_indexer_head_dim dsa_indexer_loss_coeff
        dsa_indexer_n_heads dsa_indexer_topk experimental_attention_variant fp4
        fp4_quantizer_factory fp8 fp8_quantizer_factory linear_attention_freq mamba_num_heads
        moe_input_jitter_eps moe_latent_size
        moe_router_topk_limited_devices mrope_section no_rope_freq num_labels symmetric_ar_type
        """,
    ),
    (
        False,
        """
        activation_func_fp8_input_store apply_query_key_layer_scaling
        apply_residual_connection_post_layernorm apply_rope_fusion attention_output_gate
        batch_invariant_mode bias_activation_fusion cache_mla_latents
        cuda_graph_retain_backward_graph cuda_graph_use_single_mempool
        disable_bf16_reduced_precision_matmul disable_parameter_transpose_cache
        dsa_indexer_use_sparse_loss enable_cuda_graph external_cuda_graph
        fine_grained_activation_offloading first_last_layers_bf16 flash_decode fp4_param
        fp8_dot_product_attention fp8_multi_head_attention fp8_param fused_single_qkv_rope
        heterogeneous_block_specs hetereogenous_dist_checkpoint inference_fuse_tp_communication
        inference_rng_tracker init_model_with_meta_device is_hybrid_model log_max_attention_logit
        masked_softmax_fusion memory_efficient_layer_norm moe_apply_probs_on_input
        moe_enable_deepep moe_enable_routing_replay moe_grouped_gemm moe_layer_recompute
        moe_per_layer_logging moe_permute_fusion
        moe_router_force_load_balancing moe_router_fusion moe_router_padding_for_fp8
        moe_router_padding_for_quantization
        moe_sparsemixer_sampling moe_token_dropping moe_use_legacy_grouped_gemm
        persist_layer_norm qk_clip test_mode tp_only_amax_red use_fused_weighted_squared_relu
        use_inference_optimized_layers use_kitchen use_kitchen_attention use_te_activation_func
        """,
    ),
    (True, "fp8_wgrad use_mamba_mem_eff_path"),
    (0, "fp8_margin attention_dropout hidden_dropout"),
    (
        1,
        """
        fp8_amax_history_len fp8_interval mlp_chunks_for_prefill num_layers_at_end_in_bf16
        num_layers_at_start_in_bf16
        """,
    ),
    (0.5, "qk_clip_alpha"),
    (3, "cuda_graph_warmup_steps"),
    (4, "linear_conv_kernel_dim"),
    (8, "mamba_num_groups"),
    (16, "linear_num_key_heads moe_hybridep_num_sms"),
    (20, "moe_deepep_num_sms"),
    (32, "linear_num_value_heads"),
    (42, "inference_sampling_seed"),
    (64, "mamba_head_dim"),
    (100, "qk_clip_threshold"),
    (128, "linear_key_head_dim linear_value_head_dim mamba_state_dim"),
    (2**20, "min_offloaded_tensor_size"),
    ((), "offload_modules"),
    ("", "config_logger_dir"),
    ("deepep", "moe_flex_dispatcher_backend"),
    ("delayed", "fp8_recipe"),
    ("full", "cuda_graph_scope"),
    ("most_recent", "fp8_amax_compute_algo"),
    ("none", "cuda_graph_impl"),
    ("nvfp4", "fp4_recipe"),
    ("sdpa", "kitchen_attention_backend"),
    ("transformer_engine", "transformer_impl"),
)
"""Megatron's fields at the only value that the oracle has a formula for."""

NO_EFFECT: Final = frozenset(_NO_EFFECT.split())
"""Fields of ``[model]`` without effect on the numbers of one rank."""
UNKNOWN: Final = {name: value for value, names in _UNKNOWN for name in names.split()}
"""Field of ``[model]`` -> the only value that the oracle has a formula for."""


def unknown(config: RunConfig) -> Iterator[str]:
    """Yield by name what the oracle has no formula for; nothing if it can compute the run.

    Args:
        config: Of a run on one rank whose features all change the model by design.
    """
    if config.task not in TASKS:
        yield f"task={config.task}"
    yield from (f"the plugin {name}" for name in config.enable if name not in PLUGINS)
    for name, only in UNKNOWN.items():
        if (value := config.model[name]) != only:
            yield f"model.{name}={value}"
    balancing = config.model.moe_router_load_balancing_type
    known = ("aux_loss", "seq_aux_loss", "sinkhorn", "none")
    if config.model.num_moe_experts and balancing not in known:
        yield f"model.moe_router_load_balancing_type={balancing}"
    if "lora" in config.enable and (dropout := config.plugins["lora"].dropout):
        yield f"plugins.lora.dropout={dropout}"
    if "muon" in config.enable and (dtype := config.plugins["muon"].ns_dtype) != "float32":
        yield f"plugins.muon.ns_dtype={dtype}"


def bytes_needed(config: RunConfig) -> float:
    """Estimate what the oracle keeps in memory: scores and their gradients, all in float64, and
    parameters with gradients, the optimizer's states and a copy after each of a few steps."""
    model, length = config.model, config.data.seq_length
    layers, hidden = model.num_layers + (model.mtp_num_layers or 0), model.hidden_size
    scores = 4 * config.train.micro_batch_size * model.num_attention_heads * length**2
    width = model.moe_ffn_hidden_size or model.ffn_hidden_size or 4 * hidden
    weights = hidden * (4 * hidden + 3 * width * (model.num_moe_experts or 1))
    logits = 4 * config.train.micro_batch_size * length * model.vocab_size
    copies = 8
    parameters = copies * (layers * weights + 2 * model.vocab_size * hidden)
    return float(8 * (layers * scores + logits + parameters))
