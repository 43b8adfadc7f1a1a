"""Two families of the test's own, dense and sparse, so that the engine is tested without a plugin.

Their layout is that of Llama and of Mixtral, written a second time.
"""

from __future__ import annotations

from typing import Final

from ascend_run.plugin_api import ConfigKey, ModelFamily, TensorMap

_COUNTS: Final = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
}
_OTHERS: Final = {
    "num_key_value_heads": ("num_query_groups", None),
    "head_dim": ("kv_channels", None),
    "max_position_embeddings": ("max_position_embeddings", 2048),
    "initializer_range": ("init_method_std", 0.02),
    "rms_norm_eps": ("layernorm_epsilon", 1e-6),
    "rope_theta": ("rotary_base", 10000.0),
    "attention_dropout": ("attention_dropout", 0.0),
    "tie_word_embeddings": ("share_embeddings_and_output_weights", False),
}
_MOE: Final = {
    "num_local_experts": ("num_moe_experts", 8),
    "num_experts_per_tok": ("moe_router_topk", 2),
    "router_aux_loss_coef": ("moe_aux_loss_coeff", 0.001),
}
_DEFAULTS: Final = {
    "model.normalization": "RMSNorm",
    "model.activation": "silu",
    "model.gated_linear_unit": True,
    "model.rotary_percent": 1.0,
    "model.hidden_dropout": 0.0,
    "model.layernorm_epsilon": 1e-5,
    "model.attention_dropout": 0.0,
}
_IGNORED: Final = frozenset(
    ["bos_token_id", "eos_token_id", "pad_token_id", "dtype", "transformers_version", "use_cache"]
)
_ATTENTION: Final = """
embedding.word_embeddings.weight        = copy: model.embed_tokens.weight
decoder.final_layernorm.weight          = copy: model.norm.weight
output_layer.weight                     = copy: lm_head.weight
L.input_layernorm.weight                = copy: H.input_layernorm.weight
L.pre_mlp_layernorm.weight              = copy: H.post_attention_layernorm.weight
L.self_attention.linear_proj.weight     = copy: H.self_attn.o_proj.weight
L.self_attention.linear_qkv.weight      = qkv: \
 H.self_attn.q_proj.weight H.self_attn.k_proj.weight H.self_attn.v_proj.weight
"""
_DENSE: Final = """
L.mlp.linear_fc1.weight                 = concat: H.mlp.gate_proj.weight H.mlp.up_proj.weight
L.mlp.linear_fc2.weight                 = copy: H.mlp.down_proj.weight
"""
_SPARSE: Final = """
L.mlp.router.weight                     = copy: H.block_sparse_moe.gate.weight
L.mlp.experts.fc1                       = stack_experts: E.w1.weight E.w3.weight
L.mlp.experts.fc2                       = stack_experts: E.w2.weight
"""


def _tensors(table: str) -> tuple[TensorMap, ...]:
    maps = []
    for line in filter(None, table.splitlines()):
        ours, _, theirs = line.partition(" = ")
        form, _, names = theirs.partition(": ")
        stored = names.replace("E.", "H.block_sparse_moe.experts.{expert}.")
        maps.append(
            TensorMap(
                megatron=ours.strip().replace("L.", "decoder.layers.{layer}."),
                hf=tuple(stored.replace("H.", "model.layers.{layer}.").split()),
                form=form.strip(),
            )
        )
    return tuple(maps)


def _keys(width: str, others: dict[str, tuple[str, object]]) -> tuple[ConfigKey, ...]:
    counts = _COUNTS | {"intermediate_size": width}
    return (
        *(ConfigKey(hf=hf, field=f"model.{ours}") for hf, ours in counts.items()),
        *(
            ConfigKey(hf=hf, field=f"model.{ours}", default=default)
            for hf, (ours, default) in others.items()
        ),
    )


DENSE: Final = ModelFamily(
    model_type="toy_dense",
    architecture="ToyDenseForCausalLM",
    defaults=_DEFAULTS,
    keys=_keys("ffn_hidden_size", _OTHERS),
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    ignored=_IGNORED | {"pretraining_tp"},
    tensors=_tensors(_ATTENTION + _DENSE),
)
SPARSE: Final = ModelFamily(
    model_type="toy_sparse",
    architecture="ToySparseForCausalLM",
    defaults=_DEFAULTS
    | {
        "model.moe_router_pre_softmax": False,
        "model.moe_router_load_balancing_type": "aux_loss",
    },
    keys=_keys("moe_ffn_hidden_size", _OTHERS | _MOE),
    fixed={"hidden_act": "silu", "sliding_window": None, "router_jitter_noise": 0.0},
    ignored=_IGNORED | {"output_router_logits"},
    tensors=_tensors(_ATTENTION + _SPARSE),
)
