"""Head sizes and the softmax scale of multi-latent attention, from the config."""

from __future__ import annotations

import math

import attrs

from ascend_run.types.config import FieldSection


@attrs.frozen
class HeadWidths:
    """Sizes of one attention head."""

    key: int  #: Size of a query or key.
    value: int
    rotated: int  #: Size of the part that RoPE rotates.


def head_widths(model: FieldSection) -> HeadWidths:
    """Return the head sizes of ``[model]``."""
    if model.multi_latent_attention:
        rotated = model.qk_pos_emb_head_dim
        return HeadWidths(model.qk_head_dim + rotated, model.v_head_dim, rotated)
    width = model.kv_channels or model.hidden_size // model.num_attention_heads
    return HeadWidths(width, width, int(width * model.rotary_percent))


def yarn_magnitude(factor: float, mscale: float) -> float:
    """Return yarn's magnitude scale for sequences longer by ``factor``.

    Source: arXiv:2309.00071, section 3.4, and DeepSeek-V2's published code.
    """
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def latent_softmax_scale(model: FieldSection) -> float:
    """Return the softmax scale of multi-latent attention for ``[model]``, as in Megatron."""
    magnitude = yarn_magnitude(model.rotary_scaling_factor, model.mscale_all_dim)
    return magnitude**2 / math.sqrt(head_widths(model).key)
