"""Mixtral: a Llama-like decoder whose MLPs are a sparse mixture of SwiGLU experts."""

from __future__ import annotations

from ascend_run.families import (
    DECODER,
    EXPERT_DEFAULTS,
    FamilyPlugin,
    derived,
    expert_tensors,
    family_manifest,
    router_keys,
)
from ascend_run.plugin_api import Condition, ConfigKey


class Mixtral(FamilyPlugin):
    """Hugging Face's ``mixtral``."""

    family = derived(
        DECODER,
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        defaults={
            "model.rotary_base": 1e6,
            "model.num_moe_experts": 8,
            "model.moe_router_topk": 2,
            # A softmax over the selected logits equals Hugging Face's softmax over all logits after
            # the selected ones are normalized to a sum of 1.
            **EXPERT_DEFAULTS,
            "model.moe_router_pre_softmax": False,
        },
        keys=(
            ConfigKey(hf="intermediate_size", field="model.moe_ffn_hidden_size"),
            *router_keys("num_local_experts", experts=8, topk=2),
        ),
        key_defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        # Hugging Face's jitter scales the experts' input too; Megatron's only the router's input.
        fixed={"sliding_window": None, "router_jitter_noise": 0.0},
        ignored=("output_router_logits",),
        without=("mlp.",),
        tensors=expert_tensors("block_sparse_moe", ("w1", "w3", "w2")),
    )
    manifest = family_manifest(
        family,
        "Mixtral",
        source="arXiv:2401.04088",
        requires=(
            Condition(
                "model.num_moe_experts",
                ">",
                1,
                why="a Mixtral is a mixture of experts",
                fix="set model.num_moe_experts, or choose model.family=llama",
            ),
            Condition(
                "model.moe_router_topk",
                ">",
                1,
                why="the weight of a single chosen expert is always 1, so its router never learns",
                fix="set model.moe_router_topk to 2 or more",
            ),
        ),
    )
