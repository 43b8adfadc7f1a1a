"""Rotary positions, and the slopes of ALiBi.

Sources: RoPE, arXiv:2104.09864; ALiBi, arXiv:2108.12409.
"""

# shapes: see the package

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from ascend_run.types.config import FieldSection, RunConfig

from .scaling import pair_angles, scaled_angles


@attrs.frozen
class Rotary:
    """Rotates pairs of entries of each query and key by angles that grow with the position.

    Pair i of position s turns by ``s * angle_P[i]``.
    """

    angle_P: Tensor
    """float64; at position 1."""
    magnitude: float
    """Factor on what is rotated; yarn and longrope scale the scores by its square."""
    interleaved: bool
    """A pair is two adjacent entries; otherwise they are half of the rotated width apart."""

    def __call__(self, x_BSND: Tensor) -> Tensor:
        """Rotate the first R entries of each head."""
        width = 2 * len(self.angle_P)
        rotated, rest = x_BSND[..., :width], x_BSND[..., width:]
        angle_SP = torch.arange(x_BSND.shape[1]).double().outer(self.angle_P)
        cos, sin = (
            f(angle_SP)[:, None].to(x_BSND) * self.magnitude for f in (torch.cos, torch.sin)
        )
        pairs = rotated.unflatten(-1, (-1, 2) if self.interleaved else (2, -1))
        axis = -1 if self.interleaved else -2
        a, b = pairs.unbind(axis)
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), axis).flatten(-2)
        return torch.cat((turned, rest), dim=-1)


def rotary_of(config: RunConfig, seq_length: int, *, has_window: bool) -> Rotary | None:
    """Return the rotation of a layer; None without RoPE.

    Args:
        seq_length: Length of the rows of this micro-batch, which ``dynamic`` and ``longrope`` read.
        has_window: Whether the layer has a window; those may have a base of their own.
    """
    model = config.model
    if model.position_embedding_type != "rope":
        return None
    if model.multi_latent_attention:
        width, interleaved = model.qk_pos_emb_head_dim, model.latent_rotary_interleaved
    else:
        width, interleaved = int(head_width(model) * model.rotary_percent), model.rotary_interleaved
    if has_window and model.rotary_local_base is not None:
        return Rotary(pair_angles(width, model.rotary_local_base), 1.0, interleaved)
    angle_P, magnitude = scaled_angles(config, width, seq_length)
    return Rotary(angle_P, magnitude, interleaved)


def head_width(model: FieldSection) -> int:
    """Return D."""
    return int(model.kv_channels or model.hidden_size // model.num_attention_heads)


def alibi_slopes(heads: int, max_bias: float = 8.0) -> Sequence[float]:
    """Return the slope of each head: ``2 ** (-max_bias i / n)`` for i = 1 ... n.

    If n is not a power of two: those of the power below, then every other one of the power above.
    """
    below = 2 ** math.floor(math.log2(heads))

    def series(count: int) -> list[float]:
        return [2.0 ** (-max_bias * i / count) for i in range(1, count + 1)]

    return (series(below) + series(2 * below)[::2])[:heads]
