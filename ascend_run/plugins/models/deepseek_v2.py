"""DeepSeek-V2: a decoder with multi-latent attention and, after dense layers, experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ascend_run.families import (
    DECODER,
    EXPERT_DEFAULTS,
    FamilyPlugin,
    derived,
    expert_tensors,
    family_manifest,
)
from ascend_run.families.decoder import HF_LAYER, LAYER
from ascend_run.plugin_api import Condition, ConfigKey, TensorMap

_MLP: Final = f"{LAYER}.mlp"
_HF_MLP: Final = f"{HF_LAYER}.mlp"
_LATENT_QUERY: Final = Condition("model.q_lora_rank", ">", 0)
_PLAIN_QUERY: Final = Condition("model.q_lora_rank", "==", 0)
_SHARED: Final = Condition("model.moe_shared_expert_intermediate_size", ">", 0)


def _attention() -> Iterator[TensorMap]:
    for ours, theirs, condition in (
        ("linear_q_proj", "q_proj", _PLAIN_QUERY),
        ("linear_q_down_proj", "q_a_proj", _LATENT_QUERY),
        ("q_layernorm", "q_a_layernorm", _LATENT_QUERY),
        ("linear_q_up_proj", "q_b_proj", _LATENT_QUERY),
        ("linear_kv_down_proj", "kv_a_proj_with_mqa", None),
        ("kv_layernorm", "kv_a_layernorm", None),
        ("linear_kv_up_proj", "kv_b_proj", None),
        ("linear_proj", "o_proj", None),
    ):
        yield TensorMap(
            megatron=f"{LAYER}.self_attention.{ours}.weight",
            hf=(f"{HF_LAYER}.self_attn.{theirs}.weight",),
            condition=condition,
        )


def _gated(ours: str, theirs: str, layers: str, condition: Condition | None) -> Iterator[TensorMap]:
    """Yield the tensors of a gated MLP, for layers of one kind."""
    for name, parts, form in (
        ("linear_fc1", ("gate_proj", "up_proj"), "concat"),
        ("linear_fc2", ("down_proj",), "copy"),
    ):
        yield TensorMap(
            megatron=f"{ours}.{name}.weight",
            hf=tuple(f"{theirs}.{part}.weight" for part in parts),
            form=form,
            layers=layers,
            condition=condition,
        )


class DeepseekV2(FamilyPlugin):
    """Hugging Face's ``deepseek_v2``."""

    family = derived(
        DECODER,
        model_type="deepseek_v2",
        architecture="DeepseekV2ForCausalLM",
        defaults={
            # Fixed for the norms of the latents, and Megatron has one epsilon for all norms.
            "model.layernorm_epsilon": 1e-6,
            "model.multi_latent_attention": True,
            "model.qk_layernorm": True,  # of the latents
            # The weights of the selected experts come from a softmax over all experts and are not
            # normalized to a sum of 1.
            **EXPERT_DEFAULTS,
            "model.moe_router_pre_softmax": True,
            "model.moe_router_topk_scaling_factor": 1.0,
        },
        keys=(
            ConfigKey(hf="q_lora_rank", field="model.q_lora_rank", default=1536, nullable=True),
            ConfigKey(hf="kv_lora_rank", field="model.kv_lora_rank", default=512),
            ConfigKey(hf="qk_nope_head_dim", field="model.qk_head_dim", default=128),
            ConfigKey(hf="qk_rope_head_dim", field="model.qk_pos_emb_head_dim", default=64),
            ConfigKey(hf="v_head_dim", field="model.v_head_dim", default=128),
            ConfigKey(hf="n_routed_experts", field="model.num_moe_experts", default=64),
            ConfigKey(hf="num_experts_per_tok", field="model.moe_router_topk"),
            ConfigKey(hf="moe_intermediate_size", field="model.moe_ffn_hidden_size", default=1407),
            ConfigKey(
                hf="routed_scaling_factor",
                field="model.moe_router_topk_scaling_factor",
                default=1.0,
            ),
            ConfigKey(
                hf="first_k_dense_replace",
                field="model.moe_layer_freq",
                default=0,
                form="dense_layers_first",
            ),
            ConfigKey(
                hf="n_shared_experts",
                field="model.moe_shared_expert_intermediate_size",
                default=2,
                form="expert_widths",
            ),
        ),
        fixed={
            "attention_bias": False,
            "mlp_bias": False,
            "rms_norm_eps": 1e-6,
            # Hugging Face scores a group of experts by its best expert, Megatron by several.
            "topk_method": "greedy",
            "norm_topk_prob": False,
            "scoring_func": "softmax",
            "moe_layer_freq": 1,
        },
        ignored=(
            "aux_loss_alpha",  # transformers adds no such loss; model.moe_aux_loss_coeff does
            "ep_size",
            "head_dim",  # these two follow from the widths above
            "qk_head_dim",
            "n_group",  # only for the other topk_method
            "topk_group",
            "output_router_logits",
            "pretraining_tp",
            "seq_aux",
        ),
        without=("self_attention.", "mlp."),
        tensors=(
            *_attention(),
            *_gated(_MLP, _HF_MLP, "dense", None),
            *expert_tensors(layers="experts"),
            *_gated(f"{_MLP}.shared_experts", f"{_HF_MLP}.shared_experts", "experts", _SHARED),
        ),
    )
    manifest = family_manifest(
        family,
        "DeepSeek-V2",
        aliases=("deepseek",),
        source="arXiv:2405.04434",
        requires=(
            Condition(
                "model.multi_latent_attention",
                "==",
                value=True,
                why="DeepSeek-V2 computes keys and values from a latent",
                fix="leave model.multi_latent_attention out, or choose model.family=mixtral",
            ),
        ),
    )
