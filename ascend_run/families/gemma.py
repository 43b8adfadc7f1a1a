"""What the families of Gemma share."""

from __future__ import annotations

from typing import Final

from ascend_run.plugin_api import ConfigKey, ModelFamily

from .decoder import DECODER, attention_bias
from .derivation import derived
from .forms import INVERSE_SQUARE_ROOT
from .windows import layer_types, sliding_window

GEMMA: Final[ModelFamily] = derived(
    DECODER,
    model_type="",
    architecture="",
    defaults={
        "model.activation": "gelu_tanh",
        "model.kv_channels": 256,
        "model.layernorm_epsilon": 1e-6,
        "model.layernorm_zero_centered_gamma": True,
        "model.scale_embedding": True,
        "model.share_embeddings_and_output_weights": True,
    },
    keys=attention_bias(),
    key_defaults={"head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True},
    fixed={"use_bidirectional_attention": (None, False)},
)
"""GELU in the gated MLP, norms of 1 + weight, embeddings scaled by the width."""

WINDOWED_GEMMA: Final[ModelFamily] = derived(
    GEMMA,
    model_type="",
    architecture="",
    defaults={"model.norm_placement": "both", "model.window_size": (4095, 0)},
    keys=(
        *sliding_window(4096, also="sliding_window_size"),
        *layer_types(),
        ConfigKey(
            hf="query_pre_attn_scalar",
            field="model.softmax_scale",
            default=256,
            form=INVERSE_SQUARE_ROOT,
        ),
    ),
    key_defaults={"num_key_value_heads": 4},
    fixed={
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": ("gelu_pytorch_tanh", None),
    },
    ignored=("cache_implementation",),
    names={
        ".post_attention_layernorm.": ".pre_feedforward_layernorm.",
        ".post_self_attn_layernorm.": ".post_attention_layernorm.",
        ".post_mlp_layernorm.": ".post_feedforward_layernorm.",
    },
)
"""Gemma from its second generation on: norms on both sides, and a window in some layers."""
