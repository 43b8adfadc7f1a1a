"""Mixtral as data: what its config keys and tensors are called on both sides."""

from __future__ import annotations

from typing import Final

from ascend_run.plugin_api import ConfigKey, ModelFamily, TensorMap

_LAYER: Final = "decoder.layers.{layer}"
_HF_LAYER: Final = "model.layers.{layer}"
_HF_EXPERT: Final = f"{_HF_LAYER}.block_sparse_moe.experts.{{expert}}"

FAMILY: Final = ModelFamily(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    defaults={
        "model.normalization": "RMSNorm",
        "model.layernorm_epsilon": 1e-5,
        "model.activation": "silu",
        "model.gated_linear_unit": True,
        "model.add_bias_linear": False,
        "model.position_embedding_type": "rope",
        "model.rotary_base": 1e6,
        "model.rotary_percent": 1.0,
        "model.share_embeddings_and_output_weights": False,
        "model.attention_dropout": 0.0,
        "model.hidden_dropout": 0.0,
        "model.num_moe_experts": 8,
        "model.moe_router_topk": 2,
        # Softmax over the chosen logits is what Hugging Face's softmax over all of them comes to
        # once the chosen ones are scaled to a sum of 1.
        "model.moe_router_score_function": "softmax",
        "model.moe_router_pre_softmax": False,
        "model.moe_router_load_balancing_type": "aux_loss",
        "model.moe_aux_loss_coeff": 0.001,
        "model.moe_token_dispatcher_type": "alltoall",
    },
    keys=(
        ConfigKey(hf="vocab_size", field="model.vocab_size"),
        ConfigKey(hf="hidden_size", field="model.hidden_size"),
        ConfigKey(hf="intermediate_size", field="model.moe_ffn_hidden_size"),
        ConfigKey(hf="num_hidden_layers", field="model.num_layers"),
        ConfigKey(hf="num_attention_heads", field="model.num_attention_heads"),
        ConfigKey(hf="num_key_value_heads", field="model.num_query_groups", default=8),
        ConfigKey(hf="head_dim", field="model.kv_channels", default=None),
        ConfigKey(hf="num_local_experts", field="model.num_moe_experts", default=8),
        ConfigKey(hf="num_experts_per_tok", field="model.moe_router_topk", default=2),
        ConfigKey(hf="router_aux_loss_coef", field="model.moe_aux_loss_coeff", default=0.001),
        ConfigKey(
            hf="max_position_embeddings", field="model.max_position_embeddings", default=131072
        ),
        ConfigKey(hf="initializer_range", field="model.init_method_std", default=0.02),
        ConfigKey(hf="rms_norm_eps", field="model.layernorm_epsilon", default=1e-5),
        ConfigKey(hf="rope_theta", field="model.rotary_base", default=1e6),
        ConfigKey(hf="attention_dropout", field="model.attention_dropout", default=0.0),
        ConfigKey(
            hf="tie_word_embeddings",
            field="model.share_embeddings_and_output_weights",
            default=False,
        ),
    ),
    # Hugging Face's jitter scales what the experts read too; Megatron's only what the router reads.
    fixed={"hidden_act": "silu", "sliding_window": None, "router_jitter_noise": 0.0},
    ignored=frozenset(
        {
            "_name_or_path",
            "bos_token_id",
            "dtype",
            "eos_token_id",
            "output_attentions",
            "output_hidden_states",
            "output_router_logits",
            "pad_token_id",
            "torch_dtype",
            "transformers_version",
            "unk_token_id",
            "use_cache",
        }
    ),
    tensors=(
        TensorMap(megatron="embedding.word_embeddings.weight", hf=("model.embed_tokens.weight",)),
        TensorMap(
            megatron=f"{_LAYER}.input_layernorm.weight", hf=(f"{_HF_LAYER}.input_layernorm.weight",)
        ),
        TensorMap(
            megatron=f"{_LAYER}.self_attention.linear_qkv.weight",
            hf=tuple(f"{_HF_LAYER}.self_attn.{part}_proj.weight" for part in "qkv"),
            form="qkv",
        ),
        TensorMap(
            megatron=f"{_LAYER}.self_attention.linear_proj.weight",
            hf=(f"{_HF_LAYER}.self_attn.o_proj.weight",),
        ),
        TensorMap(
            megatron=f"{_LAYER}.pre_mlp_layernorm.weight",
            hf=(f"{_HF_LAYER}.post_attention_layernorm.weight",),
        ),
        TensorMap(
            megatron=f"{_LAYER}.mlp.router.weight",
            hf=(f"{_HF_LAYER}.block_sparse_moe.gate.weight",),
        ),
        TensorMap(
            megatron=f"{_LAYER}.mlp.experts.fc1",
            hf=(f"{_HF_EXPERT}.w1.weight", f"{_HF_EXPERT}.w3.weight"),  # gate, then up
            form="stack_experts",
        ),
        TensorMap(
            megatron=f"{_LAYER}.mlp.experts.fc2",
            hf=(f"{_HF_EXPERT}.w2.weight",),
            form="stack_experts",
        ),
        TensorMap(megatron="decoder.final_layernorm.weight", hf=("model.norm.weight",)),
        TensorMap(megatron="output_layer.weight", hf=("lm_head.weight",)),
    ),
)
