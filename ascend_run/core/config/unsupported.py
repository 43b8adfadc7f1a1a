"""Megatron's fields that cannot be chosen here, and why: data, with one sentence each.

A field may always keep Megatron's default. What is refused at any other value would be ignored, or
need a library that this runtime does not build on; both would make a run other than it says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from .megatron_fields import MegatronField
from .value_types import show

_PRECISION: Final = "it follows train.precision; set that"
_ENGINE: Final = "it needs Transformer Engine, which is not used here"
_CUDA_GRAPHS: Final = "CUDA graphs are not supported yet"
_LOW_PRECISION: Final = "fp8 and fp4 are not supported yet; set train.precision"
_DEPRECATED: Final = "Megatron ignores it"
_RUNTIME: Final = "the runtime sets it"
_NOT_YET: Final = "it is not supported yet"

_NEVER: Final[Mapping[str, str]] = {
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
"""Refused whatever the value."""

_DEFAULT_ONLY: Final[Mapping[str, str]] = {
    "activation_func_clamp_value": _NOT_YET,
    "activation_func_fp8_input_store": _LOW_PRECISION,
    "apply_query_key_layer_scaling": _NOT_YET,
    "apply_rope_fusion": _ENGINE,
    "async_tensor_model_parallel_allreduce": _DEPRECATED,
    "attention_output_gate": _NOT_YET,
    "batch_invariant_mode": _ENGINE,
    "bias_activation_fusion": "a fused activation is the platform's operator, taken by itself",
    "cache_mla_latents": "it is for inference",
    "cpu_offloading": _ENGINE,
    "cross_entropy_loss_fusion": "the loss kernel is a plugin's; see: ascend-run plugins",
    "cuda_graph_impl": _CUDA_GRAPHS,
    "defer_embedding_wgrad_compute": "it needs APEX, which is not used here",
    "delay_wgrad_compute": _ENGINE,
    "disable_parameter_transpose_cache": _ENGINE,
    "enable_cuda_graph": _CUDA_GRAPHS,
    "experimental_attention_variant": _NOT_YET,
    "external_cuda_graph": _CUDA_GRAPHS,
    "fine_grained_activation_offloading": _ENGINE,
    "first_last_layers_bf16": _LOW_PRECISION,
    "fused_single_qkv_rope": _ENGINE,
    "glu_linear_offset": _NOT_YET,
    "gradient_accumulation_fusion": "it needs APEX, which is not used here",
    "heterogeneous_block_specs": _NOT_YET,
    "hierarchical_context_parallel_sizes": "the sequence exchange is a plugin's",
    "hybrid_context_parallel": "the sequence exchange is a plugin's",
    "init_model_with_meta_device": "our own initialisation is used",
    "is_hybrid_model": "Mamba layers are not supported yet",
    "log_max_attention_logit": _NOT_YET,
    "masked_softmax_fusion": "the attention kernel is a plugin's; see: ascend-run plugins",
    "max_seqlen_per_dp_cp_rank": "the sequence exchange is a plugin's",
    "memory_efficient_layer_norm": "it needs APEX, which is not used here",
    "moe_apply_probs_on_input": _NOT_YET,
    "moe_enable_deepep": "DeepEP is not used here",
    "moe_extended_tp": _DEPRECATED,
    "moe_grouped_gemm": "grouped experts are a plugin's; see: ascend-run plugins",
    "moe_latent_size": _ENGINE,
    "moe_layer_recompute": _DEPRECATED,
    "moe_permute_fusion": _ENGINE,
    "moe_router_fusion": _ENGINE,
    "moe_router_padding_for_fp8": _LOW_PRECISION,
    "moe_router_padding_for_quantization": _LOW_PRECISION,
    "moe_token_dropping": "Megatron does not support it",
    "moe_use_legacy_grouped_gemm": "grouped experts are a plugin's; see: ascend-run plugins",
    "mtp_num_layers": "multi-token prediction is not supported yet",
    "mtp_standalone": _RUNTIME,
    "no_rope_freq": _NOT_YET,
    "num_microbatches_with_partial_activation_checkpoints": _NOT_YET,
    "overlap_moe_expert_parallel_comm": _NOT_YET,
    "overlap_p2p_comm_warmup_flush": _NOT_YET,
    "perform_initialization": "our own initialisation is used",
    "persist_layer_norm": "it needs APEX, which is not used here",
    "qk_clip": _NOT_YET,
    "symmetric_ar_type": _ENGINE,
    "tp_comm_overlap": _ENGINE,
    "tp_only_amax_red": _LOW_PRECISION,
    "transformer_impl": "the model is built of our own modules",
    "use_cpu_initialization": "our own initialisation is used",
    "use_inference_optimized_layers": "it is for inference",
    "use_kitchen": "it needs kitchen, which is not used here",
    "use_kitchen_attention": "it needs kitchen, which is not used here",
    "use_ring_exchange_p2p": "it needs a torch of its own, which is not used here",
    "use_te_activation_func": "a fused activation is the platform's operator, taken by itself",
    "use_te_rng_tracker": _ENGINE,
    "window_attn_skip_freq": _NOT_YET,
}
"""Refused at any value but the default."""

_LOW_PRECISION_PREFIXES: Final = ("fp8", "fp4")

_CHOICES: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "cross_entropy_fusion_impl": (("native",), _ENGINE),
    "moe_token_dispatcher_type": (("allgather", "alltoall"), "'flex' needs DeepEP"),
    "rope_type": (("rope", "yarn"), "Megatron knows 'rope' and 'yarn' only"),
}
"""Name -> the values that are supported, and why no other is."""


def refusal(field: MegatronField, value: Any) -> str | None:
    """Why a field cannot have a value; None where it can."""
    if field.type is None or field.name in _NEVER:
        return _NEVER.get(field.name, "it is a Python object, which a config cannot hold")
    if field.name in _CHOICES:
        supported, why = _CHOICES[field.name]
        return None if value in supported else f"{why}, not {show(value)}"
    if value == field.default:
        return None
    if field.name.startswith(_LOW_PRECISION_PREFIXES):
        return _LOW_PRECISION
    return _DEFAULT_ONLY.get(field.name)


OWN_DEFAULTS: Final[Mapping[str, Any]] = {
    "expert_tensor_parallel_size": 1,
    "moe_token_dispatcher_type": "alltoall",
    "q_lora_rank": None,
    "rope_type": "rope",
}
"""Where ours is another than Megatron's: an expert is small, and is not cut unless asked for; of
the dispatchers that need nothing else, the one that sends the least; latent queries and stretched
positions are asked for too."""
