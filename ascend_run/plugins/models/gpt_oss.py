"""gpt-oss: experts with biases, a clamped gate, attention sinks, a window in every other layer."""

from __future__ import annotations

from collections.abc import Iterator

from ascend_run.families import (
    DECODER,
    EXPERT_DEFAULTS,
    SPARSE,
    FamilyPlugin,
    attention_bias,
    derived,
    family_manifest,
    layer_types,
    sliding_window,
)
from ascend_run.families.decoder import HF_LAYER, LAYER
from ascend_run.plugin_api import ConfigKey, TensorMap


def _experts() -> Iterator[TensorMap]:
    """Yield the tensors of router and experts; gate and up alternate, in matrices [in, out]."""
    ours, theirs = f"{LAYER}.mlp", f"{HF_LAYER}.mlp"
    for part in ("weight", "bias"):
        yield TensorMap(megatron=f"{ours}.router.{part}", hf=(f"{theirs}.router.{part}",))
    for name, stored, form in (
        ("fc1", "gate_up_proj", "stacked_interleaved"),
        ("fc2", "down_proj", "stacked"),
    ):
        for part in ("", "_bias"):
            yield TensorMap(
                megatron=f"{ours}.experts.{name}{part}",
                hf=(f"{theirs}.experts.{stored}{part}",),
                form=form,
                transposed=not part,
            )


class GptOss(FamilyPlugin):
    """Hugging Face's ``gpt_oss``."""

    family = derived(
        DECODER,
        model_type="gpt_oss",
        architecture="GptOssForCausalLM",
        defaults={
            "model.add_qkv_bias": True,
            "model.add_linear_proj_bias": True,
            "model.add_router_bias": True,
            "model.add_expert_bias": True,
            "model.activation": "quick_gelu",
            "model.activation_func_clamp_value": 7.0,
            "model.glu_linear_offset": 1.0,
            "model.softmax_type": "learnable",
            "model.window_size": (127, 0),
            "model.window_attn_skip_freq": 2,
            **EXPERT_DEFAULTS,
            "model.moe_router_pre_softmax": False,
        },
        keys=(
            *attention_bias(default=True),
            *sliding_window(128),
            *layer_types(),
            ConfigKey(hf="intermediate_size", field="model.moe_ffn_hidden_size"),
            ConfigKey(hf="num_local_experts", field="model.num_moe_experts", default=128),
            ConfigKey(
                hf="num_experts_per_tok",
                field="model.moe_router_topk",
                default=4,
                also="experts_per_token",
            ),
            ConfigKey(hf="router_aux_loss_coef", field="model.moe_aux_loss_coeff", default=0.001),
            ConfigKey(hf="swiglu_limit", field="model.activation_func_clamp_value", default=7.0),
            ConfigKey(hf="swiglu_alpha", field="model.quick_gelu_alpha", default=1.702),
        ),
        key_defaults={
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
        },
        ignored=(
            "initial_context_length",
            "output_router_logits",
            "quantization_config",  # the names and dtypes of the tensors say it
        ),
        without=("mlp.",),
        tensors=_experts(),
    )
    manifest = family_manifest(family, "gpt-oss", source="arXiv:2508.10925", requires=(SPARSE,))
