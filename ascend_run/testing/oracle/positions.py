"""Rotary positions and their scaling; the slopes of ALiBi.

Sources: RoPE, arXiv:2104.09864; linear scaling, arXiv:2306.15595; dynamic NTK and yarn,
arXiv:2309.00071; longrope, arXiv:2402.13753; llama3, arXiv:2407.21783; ALiBi, arXiv:2108.12409.
The parameters of scalings, and yarn's rounding, are those of Hugging Face's ``rope_parameters``.
"""

# shapes: see the package

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from ascend_run.types.config import FieldSection, RunConfig


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
        return Rotary(_angles(width, model.rotary_local_base), 1.0, interleaved)
    angle_P, magnitude = _scaled(config, width, seq_length)
    return Rotary(angle_P, magnitude, interleaved)


def head_width(model: FieldSection) -> int:
    """Return D."""
    return int(model.kv_channels or model.hidden_size // model.num_attention_heads)


def _angles(width: int, base: float) -> Tensor:
    """Return ``base ** (-2 i / R)`` for each pair i, [P]."""
    return float(base) ** -(torch.arange(0, width, 2).double() / width)


def _scaled(config: RunConfig, width: int, seq_length: int) -> tuple[Tensor, float]:
    """Return each pair's angle at position 1, and the magnitude."""
    model, base = config.model, config.model.rotary_base
    plain = _angles(width, base)
    longest = model.max_position_embeddings or config.data.seq_length
    if model.multi_latent_attention:
        if model.rope_type != "yarn":
            return plain, 1.0
        factor, original = model.rotary_scaling_factor, model.original_max_position_embeddings
        ramp = _yarn_ramp(width, base, original, (model.beta_fast, model.beta_slow), rounds=True)
        ratio = yarn_magnitude(factor, model.mscale) / yarn_magnitude(factor, model.mscale_all_dim)
        return plain * (ramp + (1 - ramp) / factor), ratio
    kind = model.rope_scaling_type
    original = model.rope_scaling_original_max_position_embeddings or longest
    factor = model.rope_scaling_factor or longest / original
    if kind is None:
        return plain, 1.0
    if kind == "linear":
        return plain / factor, 1.0
    if kind == "dynamic":
        growth = factor * max(seq_length, longest) / longest - (factor - 1)
        return _angles(width, base * growth ** (width / (width - 2))), 1.0
    if kind == "llama3":
        # Rotations over the original length: a wavelength is 2 pi / angle.
        rotations_P = original * plain / (2 * math.pi)
        low, high = model.rope_scaling_low_freq_factor, model.rope_scaling_high_freq_factor
        kept = ((rotations_P - low) / (high - low)).clamp(0, 1)
        return plain * (kept + (1 - kept) / factor), 1.0
    if kind == "longrope":
        is_long = seq_length > original
        factors = model.rope_scaling_long_factor if is_long else model.rope_scaling_short_factor
        default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        magnitude = model.rope_scaling_attention_factor or default
        return plain / torch.tensor(factors).double(), magnitude
    fast = 32.0 if model.rope_scaling_beta_fast is None else model.rope_scaling_beta_fast
    slow = 1.0 if model.rope_scaling_beta_slow is None else model.rope_scaling_beta_slow
    rounds = model.rope_scaling_truncate is not False
    ramp = _yarn_ramp(width, base, original, (fast, slow), rounds=rounds)
    return plain * (ramp + (1 - ramp) / factor), _yarn_attention_factor(model, factor)


def _yarn_attention_factor(model: FieldSection, factor: float) -> float:
    if model.rope_scaling_attention_factor is not None:
        return float(model.rope_scaling_attention_factor)
    one, all_dims = model.rope_scaling_mscale, model.rope_scaling_mscale_all_dim
    if one and all_dims:
        return yarn_magnitude(factor, one) / yarn_magnitude(factor, all_dims)
    return yarn_magnitude(factor, 1.0)


def yarn_magnitude(factor: float, mscale: float) -> float:
    """Return ``0.1 m ln(s) + 1``, arXiv:2309.00071, equation 22."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_ramp(
    width: int, base: float, original: int, betas: tuple[float, float], *, rounds: bool
) -> Tensor:
    """Return the share of each pair's own angle, [P]: 1 if it rotates often over the original
    length, 0 if seldom, and linear in the index of the pair between both."""

    def pair_with(rotations: float) -> float:
        """Solve ``original * base ** (-2 i / R) = 2 pi * rotations`` for i."""
        return width * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(base))

    first, last = (pair_with(beta) for beta in betas)
    if rounds:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    last += 0.001 if first == last else 0
    pair_P = torch.arange(width // 2).double()
    return 1 - ((pair_P - first) / (last - first)).clamp(0, 1)


def alibi_slopes(heads: int, max_bias: float = 8.0) -> Sequence[float]:
    """Return the slope of each head: ``2 ** (-max_bias i / n)`` for i = 1 ... n.

    If n is not a power of two: those of the power below, then every other one of the power above.
    """
    below = 2 ** math.floor(math.log2(heads))

    def series(count: int) -> list[float]:
        return [2.0 ** (-max_bias * i / count) for i in range(1, count + 1)]

    return (series(below) + series(2 * below)[::2])[:heads]
