"""Grok-1: experts with GELU, norms on both sides, capped attention scores, and multipliers."""

from __future__ import annotations

from ascend_run.families import (
    DECODER,
    EXPERT_DEFAULTS,
    SPARSE,
    FamilyPlugin,
    derived,
    expert_tensors,
    family_manifest,
    forms,
    router_keys,
)
from ascend_run.plugin_api import ConfigKey


class Grok1(FamilyPlugin):
    """The ``grok-1`` of folders that hold its weights for PyTorch."""

    family = derived(
        DECODER,
        model_type="grok-1",
        architecture="Grok1ModelForCausalLM",
        defaults={
            "model.activation": "gelu_tanh",
            "model.norm_placement": "both",
            "model.share_embeddings_and_output_weights": True,
            **EXPERT_DEFAULTS,
            # The weights of the selected experts come from a softmax over all experts and are not
            # normalized to a sum of 1.
            "model.moe_router_pre_softmax": True,
        },
        keys=(
            ConfigKey(hf="intermediate_size", field="model.moe_ffn_hidden_size"),
            *router_keys("num_experts", experts=8, topk=2),
            ConfigKey(
                hf="attn_output_multiplier",
                field="model.softmax_scale",
                default=1.0,
                form=forms.SOFTMAX_SCALE,
            ),
            ConfigKey(hf="max_attn_value", field="model.attn_logit_softcapping", default=30.0),
            ConfigKey(
                hf="embedding_multiplier_scale", field="model.embedding_multiplier", default=1.0
            ),
            ConfigKey(
                hf="output_multiplier_scale",
                field="model.logits_scaling",
                default=1.0,
                form=forms.RECIPROCAL,
            ),
        ),
        key_defaults={
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
        fixed={"hidden_act": ("gelu", "gelu_new", "gelu_pytorch_tanh")},
        ignored=("output_router_logits",),
        without=("attention_dropout", "head_dim", "mlp."),
        names={
            "self_attn.": "attn.",
            "input_layernorm.weight": "pre_attn_norm.scale",
            "post_attention_layernorm.weight": "pre_moe_norm.scale",
            "post_self_attn_layernorm.weight": "post_attn_norm.scale",
            "post_mlp_layernorm.weight": "post_moe_norm.scale",
            "model.norm.weight": "model.norm.scale",
        },
        tensors=expert_tensors("moe_block", ("linear", "linear_v", "linear_1")),
    )
    manifest = family_manifest(
        family,
        "Grok-1",
        name="grok1",
        source="github.com/xai-org/grok-1",
        requires=(SPARSE,),
    )
