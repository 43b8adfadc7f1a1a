"""Mixtral as data: its config keys and tensor names in Megatron and Hugging Face."""

from __future__ import annotations

from typing import Final

from ascend_run.plugin_api import ConfigKey, ModelFamily, TensorMap, families

_MOE: Final = f"{families.HF_LAYER}.block_sparse_moe"
_EXPERT: Final = f"{_MOE}.experts.{{expert}}"

FAMILY: Final = ModelFamily(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    defaults={
        **families.decoder_defaults(rotary_base=1e6),
        "model.num_moe_experts": 8,
        "model.moe_router_topk": 2,
        # A softmax over the selected logits equals Hugging Face's softmax over all logits after
        # the selected ones are normalized to a sum of 1.
        "model.moe_router_score_function": "softmax",
        "model.moe_router_pre_softmax": False,
        "model.moe_router_load_balancing_type": "aux_loss",
        "model.moe_aux_loss_coeff": 0.001,
        "model.moe_token_dispatcher_type": "alltoall",
    },
    keys=(
        *families.decoder_keys(
            intermediate_size="model.moe_ffn_hidden_size",
            num_key_value_heads=8,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            rope_theta=1e6,
        ),
        ConfigKey(hf="num_local_experts", field="model.num_moe_experts", default=8),
        ConfigKey(hf="num_experts_per_tok", field="model.moe_router_topk", default=2),
        ConfigKey(hf="router_aux_loss_coef", field="model.moe_aux_loss_coeff", default=0.001),
    ),
    # Hugging Face's jitter scales the experts' input too; Megatron's only the router's input.
    fixed={"hidden_act": "silu", "sliding_window": None, "router_jitter_noise": 0.0},
    ignored=families.NUMBERLESS_KEYS | {"output_router_logits"},
    tensors=(
        *families.outer_tensors(),
        *families.attention_tensors(),
        TensorMap(
            megatron=f"{families.LAYER}.mlp.router.weight",
            hf=(f"{_MOE}.gate.weight",),
        ),
        TensorMap(
            megatron=f"{families.LAYER}.mlp.experts.fc1",
            hf=(f"{_EXPERT}.w1.weight", f"{_EXPERT}.w3.weight"),  # gate, then up
            form="stack_experts",
        ),
        TensorMap(
            megatron=f"{families.LAYER}.mlp.experts.fc2",
            hf=(f"{_EXPERT}.w2.weight",),
            form="stack_experts",
        ),
    ),
)
