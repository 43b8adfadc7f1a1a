"""The record that Llama-like families derive from.

The Hugging Face names are those of transformers' decoders: ``model.layers.N.self_attn...``.
Parameters that only some models have (biases, norms of queries and keys, attention sinks) carry a
condition, so a family gets them by setting the option in its defaults.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ascend_run.plugin_api import Condition, ConfigKey, ModelFamily, TensorMap

LAYER: Final = "decoder.layers.{layer}"
HF_LAYER: Final = "model.layers.{layer}"

NUMBERLESS_KEYS: Final = frozenset(
    {
        "_name_or_path",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "unk_token_id",
        "use_cache",
    }
)
"""Keys of a config.json that do not affect the model's output, in any family."""

TIED: Final = "model.share_embeddings_and_output_weights"


def linear(
    ours: str, theirs: tuple[str, ...], form: str = "copy", *, bias: str
) -> Iterator[TensorMap]:
    """Yield the weight of a linear layer, and its bias where an option adds one.

    Args:
        ours, theirs: Names within a layer, without ``.weight``.
        bias: Option of ``[model]`` that adds the bias.
    """
    for part, condition in (("weight", None), ("bias", Condition(f"model.{bias}", "==", True))):
        yield TensorMap(
            megatron=f"{LAYER}.{ours}.{part}",
            hf=tuple(f"{HF_LAYER}.{name}.{part}" for name in theirs),
            form=form,
            condition=condition,
        )


def norm(ours: str, theirs: str, condition: Condition | None = None) -> TensorMap:
    """Return the weight of a norm within a layer."""
    return TensorMap(
        megatron=f"{LAYER}.{ours}.weight",
        hf=(f"{HF_LAYER}.{theirs}.weight",),
        condition=condition,
    )


def norm_of_inputs(ours: str, theirs: str) -> Iterator[TensorMap]:
    """Yield the weight of a norm that every model has, and the bias of a LayerNorm."""
    has_bias = Condition("model.normalization", "==", "LayerNorm")
    for part, condition in (("weight", None), ("bias", has_bias)):
        yield TensorMap(megatron=f"{ours}.{part}", hf=(f"{theirs}.{part}",), condition=condition)


def fused_qkv(theirs: str, form: str = "qkv") -> tuple[TensorMap, ...]:
    """Return queries, keys and values that are stored as one tensor.

    Args:
        form: ``qkv``: all queries, all keys, all values; ``copy``: Megatron's order, by group.
    """
    return (*linear("self_attention.linear_qkv", (theirs,), form, bias="add_qkv_bias"),)


def fused_gate_up(theirs: str) -> tuple[TensorMap, ...]:
    """Return the gate and up projections that are stored as one tensor, gate first."""
    return (*linear("mlp.linear_fc1", (theirs,), bias="add_mlp_bias"),)


def attention_bias(name: str = "attention_bias", *, default: bool = False) -> tuple[ConfigKey, ...]:
    """Return a key that adds biases to q, k, v and to the output projection alike."""
    return tuple(
        ConfigKey(hf=name, field=f"model.{field}", default=default)
        for field in ("add_qkv_bias", "add_linear_proj_bias")
    )


def mlp_bias(name: str = "mlp_bias") -> tuple[ConfigKey, ...]:
    """Return a key that adds biases to every linear of the MLP."""
    return (ConfigKey(hf=name, field="model.add_mlp_bias", default=False),)


def _tensors() -> Iterator[TensorMap]:
    yield TensorMap(megatron="embedding.word_embeddings.weight", hf=("model.embed_tokens.weight",))
    yield from norm_of_inputs("decoder.final_layernorm", "model.norm")
    yield TensorMap(megatron="output_layer.weight", hf=("lm_head.weight",))
    yield TensorMap(
        megatron="output_layer.bias",
        hf=("lm_head.bias",),
        condition=Condition("model.add_output_bias", "==", value=True),
    )
    yield from norm_of_inputs(f"{LAYER}.input_layernorm", f"{HF_LAYER}.input_layernorm")
    yield from norm_of_inputs(f"{LAYER}.pre_mlp_layernorm", f"{HF_LAYER}.post_attention_layernorm")
    for sublayer, theirs in (("self_attn", "post_self_attn"), ("mlp", "post_mlp")):
        of_outputs = Condition("model.norm_placement", "!=", "pre")
        yield norm(f"{sublayer}_bda.norm", f"{theirs}_layernorm", of_outputs)
    for name in ("q", "k"):
        by_head = Condition("model.qk_layernorm", "==", value=True)
        yield norm(f"self_attention.{name}_layernorm", f"self_attn.{name}_norm", by_head)
    yield from linear(
        "self_attention.linear_qkv",
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "qkv",
        bias="add_qkv_bias",
    )
    yield TensorMap(
        megatron=f"{LAYER}.self_attention.core_attention.softmax_offset",
        hf=(f"{HF_LAYER}.self_attn.sinks",),
        condition=Condition("model.softmax_type", "==", "learnable"),
    )
    yield from linear(
        "self_attention.linear_proj", ("self_attn.o_proj",), bias="add_linear_proj_bias"
    )
    yield from linear(
        "mlp.linear_fc1", ("mlp.gate_proj", "mlp.up_proj"), "concat", bias="add_mlp_bias"
    )
    yield from linear("mlp.linear_fc2", ("mlp.down_proj",), bias="add_mlp_bias")


DECODER: Final = ModelFamily(
    model_type="",
    architecture="",
    defaults={
        "model.normalization": "RMSNorm",
        "model.layernorm_epsilon": 1e-5,
        "model.activation": "silu",
        "model.gated_linear_unit": True,
        "model.add_bias_linear": False,
        "model.position_embedding_type": "rope",
        "model.rotary_base": 10000.0,
        "model.rotary_percent": 1.0,
        TIED: False,
        "model.attention_dropout": 0.0,
        "model.hidden_dropout": 0.0,
    },
    keys=(
        ConfigKey(hf="vocab_size", field="model.vocab_size"),
        ConfigKey(hf="hidden_size", field="model.hidden_size"),
        ConfigKey(hf="intermediate_size", field="model.ffn_hidden_size"),
        ConfigKey(hf="num_hidden_layers", field="model.num_layers"),
        ConfigKey(hf="num_attention_heads", field="model.num_attention_heads"),
        ConfigKey(hf="num_key_value_heads", field="model.num_query_groups", default=None),
        ConfigKey(hf="head_dim", field="model.kv_channels", default=None),
        ConfigKey(
            hf="max_position_embeddings", field="model.max_position_embeddings", default=2048
        ),
        ConfigKey(hf="initializer_range", field="model.init_method_std", default=0.02),
        ConfigKey(hf="rms_norm_eps", field="model.layernorm_epsilon", default=1e-6),
        ConfigKey(hf="rope_theta", field="model.rotary_base", default=10000.0),
        ConfigKey(hf="attention_dropout", field="model.attention_dropout", default=0.0),
        ConfigKey(hf="tie_word_embeddings", field=TIED, default=False),
    ),
    fixed={"hidden_act": "silu"},
    ignored=NUMBERLESS_KEYS,
    tensors=(*_tensors(),),
)
"""RMSNorm, SwiGLU, RoPE, grouped queries, no biases, no dropout. A base, not a family itself."""
