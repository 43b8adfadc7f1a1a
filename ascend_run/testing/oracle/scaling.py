"""Angles of rotary positions, scaled for longer sequences.

Sources: linear, arXiv:2306.15595; dynamic NTK and yarn, arXiv:2309.00071; longrope,
arXiv:2402.13753; llama3, arXiv:2407.21783. Parameters and yarn's rounding are those of Hugging
Face's ``rope_parameters``.
"""

# shapes: see the package

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import attrs
import torch
from torch import Tensor

from ascend_run.types.config import FieldSection, RunConfig

Scaled = tuple[Tensor, float]
"""Each pair's angle at position 1, [P] float64, and the factor on what is rotated."""


def pair_angles(width: int, base: float) -> Tensor:
    """Return ``base ** (-2 i / R)`` for each pair i."""
    return float(base) ** -(torch.arange(0, width, 2).double() / width)


def scaled_angles(config: RunConfig, width: int, seq_length: int) -> Scaled:
    """Return the angles of a model's layers, and their magnitude.

    Args:
        width: R.
        seq_length: Length of the rows of this micro-batch.
    """
    model = config.model
    longest = model.max_position_embeddings or config.data.seq_length
    if model.multi_latent_attention and model.rope_type == "yarn":
        return _latent_yarn(model, pair_angles(width, model.rotary_base))
    original = model.rope_scaling_original_max_position_embeddings or longest
    return _SCALINGS[model.rope_scaling_type](
        _Extension(
            model=model,
            width=width,
            base=model.rotary_base,
            longest=longest,
            original=original,
            factor=model.rope_scaling_factor or longest / original,
            length=seq_length,
        )
    )


@attrs.frozen(kw_only=True)
class _Extension:
    """What a scaling depends on; it reads parameters of its own of the model."""

    model: FieldSection
    width: int
    base: float
    longest: int
    original: int
    """Length before the extension. Unit: tokens, as of the next and the one before."""
    factor: float
    length: int

    @property
    def plain(self) -> Tensor:
        return pair_angles(self.width, self.base)


def _unscaled(x: _Extension) -> Scaled:
    return x.plain, 1.0


def _linear(x: _Extension) -> Scaled:
    return x.plain / x.factor, 1.0


def _dynamic(x: _Extension) -> Scaled:
    """Grow the base with the sequence, beyond the longest one."""
    growth = x.factor * max(x.length, x.longest) / x.longest - (x.factor - 1)
    return pair_angles(x.width, x.base * growth ** (x.width / (x.width - 2))), 1.0


def _llama3(x: _Extension) -> Scaled:
    """Keep pairs that rotate often over the original length, stretch those that rotate seldom."""
    rotations_P = x.original * x.plain / (2 * math.pi)
    low, high = x.model.rope_scaling_low_freq_factor, x.model.rope_scaling_high_freq_factor
    kept_P = ((rotations_P - low) / (high - low)).clamp(0, 1)
    return x.plain * (kept_P + (1 - kept_P) / x.factor), 1.0


def _longrope(x: _Extension) -> Scaled:
    """Divide each pair's angle by a factor of its own, for sequences up to the original length or
    longer ones."""
    model = x.model
    of_lengths = (
        (model.rope_scaling_short_factor, model.rope_scaling_short_mscale),
        (model.rope_scaling_long_factor, model.rope_scaling_long_mscale),
    )
    factors, magnitude = of_lengths[x.length > x.original]
    if magnitude is None:
        magnitude = model.rope_scaling_attention_factor
    if magnitude is None:
        growth = math.log(x.factor) / math.log(x.original) if x.factor > 1 else 0.0
        magnitude = math.sqrt(1 + growth)
    return x.plain / torch.tensor(factors).double(), magnitude


def _yarn(x: _Extension) -> Scaled:
    model = x.model
    fast = 32.0 if model.rope_scaling_beta_fast is None else model.rope_scaling_beta_fast
    slow = 1.0 if model.rope_scaling_beta_slow is None else model.rope_scaling_beta_slow
    rounds = model.rope_scaling_truncate is not False
    kept_P = _yarn_ramp(x.plain, x.base, x.original, (fast, slow), rounds=rounds)
    one, every = model.rope_scaling_mscale, model.rope_scaling_mscale_all_dim
    magnitude = model.rope_scaling_attention_factor
    if magnitude is None and one and every:
        magnitude = yarn_magnitude(x.factor, one) / yarn_magnitude(x.factor, every)
    if magnitude is None:
        magnitude = yarn_magnitude(x.factor, 1.0)
    return x.plain * (kept_P + (1 - kept_P) / x.factor), magnitude


def _latent_yarn(model: FieldSection, plain_P: Tensor) -> Scaled:
    """Yarn with Megatron's fields of multi-latent attention."""
    factor, original = model.rotary_scaling_factor, model.original_max_position_embeddings
    betas = (model.beta_fast, model.beta_slow)
    kept_P = _yarn_ramp(plain_P, model.rotary_base, original, betas, rounds=True)
    ratio = yarn_magnitude(factor, model.mscale) / yarn_magnitude(factor, model.mscale_all_dim)
    return plain_P * (kept_P + (1 - kept_P) / factor), ratio


def yarn_magnitude(factor: float, mscale: float) -> float:
    """Return ``0.1 m ln(s) + 1``, arXiv:2309.00071, equation 22."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_ramp(
    plain_P: Tensor, base: float, original: int, betas: tuple[float, float], *, rounds: bool
) -> Tensor:
    """Return the share of its own angle that each pair keeps: 1 if it rotates often over the
    original length, 0 if seldom, and linear in the index of the pair between both."""
    width = 2 * len(plain_P)

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


_SCALINGS: Final[Mapping[str | None, Callable[[_Extension], Scaled]]] = {
    None: _unscaled,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}
