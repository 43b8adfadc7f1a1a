"""GPT-2: a decoder with LayerNorm, biases, GELU, learned positions and a tied output layer.

Its linear layers are Conv1D with weights [in, out]; q, k and v are the columns of one weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ascend_run.families import FamilyPlugin, family_manifest
from ascend_run.families.decoder import LAYER, NUMBERLESS_KEYS, TIED
from ascend_run.plugin_api import ConfigKey, ModelFamily, TensorMap

_HF_LAYER: Final = "transformer.h.{layer}"


def _norm(ours: str, theirs: str) -> Iterator[TensorMap]:
    for part in ("weight", "bias"):
        yield TensorMap(megatron=f"{ours}.{part}", hf=(f"{theirs}.{part}",))


def _linear(ours: str, theirs: str, form: str = "copy") -> Iterator[TensorMap]:
    ours, theirs = f"{LAYER}.{ours}", f"{_HF_LAYER}.{theirs}"
    yield TensorMap(megatron=f"{ours}.weight", hf=(f"{theirs}.weight",), form=form, transposed=True)
    yield TensorMap(megatron=f"{ours}.bias", hf=(f"{theirs}.bias",), form=form)


_FAMILY: Final = ModelFamily(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    defaults={
        "model.normalization": "LayerNorm",
        "model.layernorm_epsilon": 1e-5,
        "model.activation": "gelu_tanh",
        "model.gated_linear_unit": False,
        "model.add_bias_linear": True,
        "model.position_embedding_type": "learned_absolute",
        TIED: True,
        "model.attention_dropout": 0.1,
        "model.hidden_dropout": 0.1,
    },
    keys=(
        ConfigKey(hf="vocab_size", field="model.vocab_size"),
        ConfigKey(hf="n_embd", field="model.hidden_size"),
        ConfigKey(hf="n_layer", field="model.num_layers"),
        ConfigKey(hf="n_head", field="model.num_attention_heads"),
        ConfigKey(hf="n_inner", field="model.ffn_hidden_size", default=None),
        ConfigKey(hf="n_positions", field="model.max_position_embeddings", default=1024),
        ConfigKey(hf="initializer_range", field="model.init_method_std", default=0.02),
        ConfigKey(hf="layer_norm_epsilon", field="model.layernorm_epsilon", default=1e-5),
        ConfigKey(hf="attn_pdrop", field="model.attention_dropout", default=0.1),
        # Megatron has one dropout for the embedding and for the residual branches.
        ConfigKey(hf="resid_pdrop", field="model.hidden_dropout", default=0.1),
        ConfigKey(hf="embd_pdrop", field="model.hidden_dropout", default=0.1),
        ConfigKey(hf="tie_word_embeddings", field=TIED, default=True),
    ),
    fixed={
        "activation_function": "gelu_new",
        "add_cross_attention": False,
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
    },
    ignored=NUMBERLESS_KEYS
    | {
        "gradient_checkpointing",
        "n_ctx",
        "n_special",
        "output_past",
        "predict_special_tokens",
        "reorder_and_upcast_attn",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "task_specific_params",
    },
    base_prefix="transformer.",
    buffers=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),  # the causal mask
    tensors=(
        TensorMap(megatron="embedding.word_embeddings.weight", hf=("transformer.wte.weight",)),
        TensorMap(megatron="embedding.position_embeddings.weight", hf=("transformer.wpe.weight",)),
        *_norm(f"{LAYER}.input_layernorm", f"{_HF_LAYER}.ln_1"),
        *_linear("self_attention.linear_qkv", "attn.c_attn", "qkv"),
        *_linear("self_attention.linear_proj", "attn.c_proj"),
        *_norm(f"{LAYER}.pre_mlp_layernorm", f"{_HF_LAYER}.ln_2"),
        *_linear("mlp.linear_fc1", "mlp.c_fc"),
        *_linear("mlp.linear_fc2", "mlp.c_proj"),
        *_norm("decoder.final_layernorm", "transformer.ln_f"),
        TensorMap(megatron="output_layer.weight", hf=("lm_head.weight",)),
    ),
)


class Gpt2(FamilyPlugin):
    """Hugging Face's ``gpt2``."""

    family = _FAMILY
    manifest = family_manifest(
        _FAMILY,
        "GPT-2",
        aliases=("gpt",),
        source="Radford et al. 2019, Language Models are Unsupervised Multitask Learners",
    )
