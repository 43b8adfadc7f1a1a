"""BLOOM: LayerNorm, biases, GELU, ALiBi, a norm of the embeddings and a tied output layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ascend_run.families import family_manifest
from ascend_run.families.decoder import LAYER, NUMBERLESS_KEYS, TIED
from ascend_run.plugin_api import ConfigKey, ModelFamily, TensorMap
from ascend_run.plugins.models import ALIBI, AlibiFamilyPlugin

_HF_LAYER: Final = "transformer.h.{layer}"


def _tensors() -> Iterator[TensorMap]:
    embeddings = ("transformer.word_embeddings.weight",)
    yield TensorMap(megatron="embedding.word_embeddings.weight", hf=embeddings)
    yield TensorMap(megatron="output_layer.weight", hf=("lm_head.weight",))
    for ours, theirs in (
        ("embedding.layernorm", "transformer.word_embeddings_layernorm"),
        (f"{LAYER}.input_layernorm", f"{_HF_LAYER}.input_layernorm"),
        # Stored by head, as Megatron has it.
        (f"{LAYER}.self_attention.linear_qkv", f"{_HF_LAYER}.self_attention.query_key_value"),
        (f"{LAYER}.self_attention.linear_proj", f"{_HF_LAYER}.self_attention.dense"),
        (f"{LAYER}.pre_mlp_layernorm", f"{_HF_LAYER}.post_attention_layernorm"),
        (f"{LAYER}.mlp.linear_fc1", f"{_HF_LAYER}.mlp.dense_h_to_4h"),
        (f"{LAYER}.mlp.linear_fc2", f"{_HF_LAYER}.mlp.dense_4h_to_h"),
        ("decoder.final_layernorm", "transformer.ln_f"),
    ):
        for part in ("weight", "bias"):
            yield TensorMap(megatron=f"{ours}.{part}", hf=(f"{theirs}.{part}",))


class Bloom(AlibiFamilyPlugin):
    """Hugging Face's ``bloom``."""

    family = ModelFamily(
        model_type="bloom",
        architecture="BloomForCausalLM",
        defaults={
            "model.normalization": "LayerNorm",
            "model.layernorm_epsilon": 1e-5,
            "model.embedding_layernorm": True,
            "model.activation": "gelu_tanh",
            "model.gated_linear_unit": False,
            "model.add_bias_linear": True,
            "model.position_embedding_type": "none",
            TIED: True,
            "model.attention_dropout": 0.0,
            "model.hidden_dropout": 0.0,
        },
        keys=(
            ConfigKey(hf="vocab_size", field="model.vocab_size"),
            ConfigKey(hf="hidden_size", field="model.hidden_size", also="n_embed"),
            ConfigKey(hf="n_layer", field="model.num_layers", also="num_hidden_layers"),
            ConfigKey(hf="n_head", field="model.num_attention_heads", also="num_attention_heads"),
            ConfigKey(hf="initializer_range", field="model.init_method_std", default=0.02),
            ConfigKey(hf="layer_norm_epsilon", field="model.layernorm_epsilon", default=1e-5),
            ConfigKey(hf="attention_dropout", field="model.attention_dropout", default=0.0),
            ConfigKey(hf="hidden_dropout", field="model.hidden_dropout", default=0.0),
            ConfigKey(hf="tie_word_embeddings", field=TIED, default=True),
        ),
        fixed={"apply_residual_connection_post_layernorm": False, "n_inner": None},
        ignored=NUMBERLESS_KEYS
        | {
            "attention_softmax_in_fp32",
            "bias_dropout_fusion",
            "masked_softmax_fusion",
            "offset_alibi",
            "pretraining_tp",
            "seq_length",
            "skip_bias_add",
            "skip_bias_add_qkv",
            "slow_but_exact",
        },
        base_prefix="transformer.",
        tensors=(*_tensors(),),
    )
    manifest = family_manifest(family, "BLOOM", source="arXiv:2211.05100", attention_needs=ALIBI)
