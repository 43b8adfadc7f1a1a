"""DeepSeek-V2 as data: its config keys and tensor names in Megatron and Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ascend_run.plugin_api import Condition, ConfigKey, ModelFamily, TensorMap, families

_ATTENTION: Final = f"{families.LAYER}.self_attention"
_HF_ATTENTION: Final = f"{families.HF_LAYER}.self_attn"
_MLP: Final = f"{families.LAYER}.mlp"
_HF_MLP: Final = f"{families.HF_LAYER}.mlp"
_EXPERT: Final = f"{_HF_MLP}.experts.{{expert}}"
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
            megatron=f"{_ATTENTION}.{ours}.weight",
            hf=(f"{_HF_ATTENTION}.{theirs}.weight",),
            condition=condition,
        )
    for ours, theirs in (
        ("input_layernorm", "input_layernorm"),
        ("pre_mlp_layernorm", "post_attention_layernorm"),
    ):
        yield TensorMap(
            megatron=f"{families.LAYER}.{ours}.weight",
            hf=(f"{families.HF_LAYER}.{theirs}.weight",),
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


def _experts() -> Iterator[TensorMap]:
    yield TensorMap(
        megatron=f"{_MLP}.router.weight", hf=(f"{_HF_MLP}.gate.weight",), layers="experts"
    )
    for name, parts in (("fc1", ("gate_proj", "up_proj")), ("fc2", ("down_proj",))):
        yield TensorMap(
            megatron=f"{_MLP}.experts.{name}",
            hf=tuple(f"{_EXPERT}.{part}.weight" for part in parts),
            form="stack_experts",
            layers="experts",
        )


FAMILY: Final = ModelFamily(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    defaults={
        **families.decoder_defaults(rotary_base=10000.0),
        # Fixed for the norms of the latents, and Megatron has one epsilon for all norms.
        "model.layernorm_epsilon": 1e-6,
        "model.multi_latent_attention": True,
        "model.qk_layernorm": True,  # of the latents
        # The weights of the selected experts come from a softmax over all experts and are not
        # normalized to a sum of 1.
        "model.moe_router_score_function": "softmax",
        "model.moe_router_pre_softmax": True,
        "model.moe_router_topk_scaling_factor": 1.0,
        "model.moe_router_load_balancing_type": "aux_loss",
        "model.moe_aux_loss_coeff": 0.001,
        "model.moe_token_dispatcher_type": "alltoall",
    },
    keys=(
        ConfigKey(hf="vocab_size", field="model.vocab_size"),
        ConfigKey(hf="hidden_size", field="model.hidden_size"),
        ConfigKey(hf="intermediate_size", field="model.ffn_hidden_size"),
        ConfigKey(hf="num_hidden_layers", field="model.num_layers"),
        ConfigKey(hf="num_attention_heads", field="model.num_attention_heads"),
        ConfigKey(hf="num_key_value_heads", field="model.num_query_groups", default=None),
        ConfigKey(
            hf="max_position_embeddings", field="model.max_position_embeddings", default=2048
        ),
        ConfigKey(hf="initializer_range", field="model.init_method_std", default=0.02),
        ConfigKey(hf="rope_theta", field="model.rotary_base", default=10000.0),
        ConfigKey(hf="attention_dropout", field="model.attention_dropout", default=0.0),
        ConfigKey(
            hf="tie_word_embeddings",
            field="model.share_embeddings_and_output_weights",
            default=False,
        ),
        ConfigKey(hf="q_lora_rank", field="model.q_lora_rank", default=1536, nullable=True),
        ConfigKey(hf="kv_lora_rank", field="model.kv_lora_rank", default=512),
        ConfigKey(hf="qk_nope_head_dim", field="model.qk_head_dim", default=128),
        ConfigKey(hf="qk_rope_head_dim", field="model.qk_pos_emb_head_dim", default=64),
        ConfigKey(hf="v_head_dim", field="model.v_head_dim", default=128),
        ConfigKey(hf="n_routed_experts", field="model.num_moe_experts", default=64),
        ConfigKey(hf="num_experts_per_tok", field="model.moe_router_topk"),
        ConfigKey(hf="moe_intermediate_size", field="model.moe_ffn_hidden_size", default=1407),
        ConfigKey(
            hf="routed_scaling_factor", field="model.moe_router_topk_scaling_factor", default=1.0
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
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": 1e-6,
        # Hugging Face scores a group of experts by its best expert, Megatron by several.
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "moe_layer_freq": 1,
    },
    ignored=families.NUMBERLESS_KEYS
    | {
        "auto_map",
        "aux_loss_alpha",  # transformers adds no such loss; model.moe_aux_loss_coeff does
        "ep_size",
        "head_dim",  # these two follow from the widths above
        "qk_head_dim",
        "n_group",  # only for the other topk_method
        "topk_group",
        "output_router_logits",
        "pretraining_tp",
        "seq_aux",
    },
    tensors=(
        *families.outer_tensors(),
        *_attention(),
        *_gated(f"{_MLP}", _HF_MLP, "dense", None),
        *_experts(),
        *_gated(f"{_MLP}.shared_experts", f"{_HF_MLP}.shared_experts", "experts", _SHARED),
    ),
)
