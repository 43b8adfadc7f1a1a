"""Multi-latent attention in a config: widths of a head, and how Megatron's fields of it fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import attrs

from ascend_run.plugin_api.config import RunConfig

from .megatron_fields import megatron_fields
from .unsupported import OWN_DEFAULTS
from .value_types import show

_STRETCHING: Final = (
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)
"""What only stretched positions read."""
_WITHOUT: Final = {
    "add_qkv_bias": "its projections have no biases",
    "kv_channels": "set model.qk_head_dim, model.qk_pos_emb_head_dim and model.v_head_dim",
    "qk_l2_norm": "Megatron's latent attention has no such norm",
    "rope_scaling_type": "set model.rope_type='yarn' and Megatron's fields of it",
    "rotary_interleaved": "its rotated pairs always lie side by side",
    "softmax_scale": "the scale follows from the widths of a head and from model.mscale_all_dim",
}
"""Options of the plain attention that latent attention does not read, and what to do."""


@attrs.frozen
class HeadWidths:
    """Of one head."""

    key: int
    """Of its query and its key."""
    value: int
    rotated: int
    """How much of a query or key turns with its position."""


def head_widths(model: Any) -> HeadWidths:
    """Widths of a head of ``[model]``."""
    if model.get("multi_latent_attention"):
        rotated = model.qk_pos_emb_head_dim
        return HeadWidths(model.qk_head_dim + rotated, model.v_head_dim, rotated)
    width = model.kv_channels or model.hidden_size // model.num_attention_heads
    return HeadWidths(width, width, int(width * model.rotary_percent))


def yarn_magnitude(factor: float, mscale: float) -> float:
    """How much longer queries and keys are for a sequence that is ``factor`` times as long.

    Source: arXiv:2309.00071, section 3.4, and DeepSeek-V2's published code.
    """
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def latent_softmax_scale(model: Any) -> float:
    """Factor on the scores of ``[model]`` with multi-latent attention, as Megatron has it."""
    magnitude = yarn_magnitude(model.rotary_scaling_factor, model.mscale_all_dim)
    return magnitude**2 / math.sqrt(head_widths(model).key)


def latent_problems(config: RunConfig) -> Iterator[str]:
    """A sentence for each option that does not go with the kind of attention."""
    model = config.model
    if not model.get("multi_latent_attention"):
        for name in _changed(model, [n for n, field in megatron_fields().items() if field.latent]):
            yield f"model.{name}={show(model[name])} needs model.multi_latent_attention=true"
        return
    for name, instead in _WITHOUT.items():
        if model.get(name):
            yield (
                f"model.{name}={show(model[name])} does not go with "
                f"model.multi_latent_attention=true; leave it out: {instead}"
            )
    heads, groups = model.num_attention_heads, model.num_query_groups
    if groups not in (None, heads):
        yield (
            f"model.num_query_groups={groups} does not go with model.multi_latent_attention=true, "
            f"whose latent gives each of model.num_attention_heads={heads} heads its own key; "
            "leave it out"
        )
    if model.position_embedding_type != "rope":
        yield (
            f"model.position_embedding_type={show(model.position_embedding_type)} does not go with "
            "model.multi_latent_attention=true, which rotates a part of each head; use 'rope'"
        )
    if model.rotary_percent != 1.0:
        yield (
            f"model.rotary_percent={model.rotary_percent} does not go with "
            "model.multi_latent_attention=true; set model.qk_pos_emb_head_dim, all of which turns"
        )
    if model.qk_pos_emb_head_dim % 2:
        yield (
            "rotary positions turn pairs, but "
            f"model.qk_pos_emb_head_dim={model.qk_pos_emb_head_dim} is odd"
        )
    if model.rope_type != "yarn":
        for name in _changed(model, _STRETCHING):
            yield f"model.{name}={show(model[name])} needs model.rope_type='yarn'"


def _changed(model: Any, names: Any) -> Iterator[str]:
    """Those of Megatron's fields that are not at their defaults."""
    for name in names:
        default = OWN_DEFAULTS.get(name, megatron_fields()[name].default)
        if name in model and model[name] != default:
            yield name
