"""Angles of scaled rotary positions, with the parameters of Hugging Face configs.

Sources: linear, arXiv:2306.15595; dynamic NTK and yarn, arXiv:2309.00071; longrope,
arXiv:2402.13753; llama3, arXiv:2407.21783 and its published code.
"""

# R rotary dim of a head, P = R / 2 pairs

from __future__ import annotations

import math
from typing import Any, Self

import attrs
import torch
from torch import Tensor

from ascend_run.core.config.latent_attention import yarn_magnitude
from ascend_run.core.config.rotary_keys import NAMES, PREFIX
from ascend_run.types.config import RunConfig


@attrs.frozen(kw_only=True)
class RotaryScaling:
    """One RoPE scaling with its parameters; see ``core.config.rotary_keys``."""

    type: str
    max_position_embeddings: int
    original_max_position_embeddings: int
    factor: float
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @classmethod
    def of(cls, config: RunConfig) -> Self | None:
        """Return the scaling of a run's model, or None without one."""
        model = config.model
        if model.multi_latent_attention and model.rope_type == "yarn":
            return cls._of_latent(config)
        if model.rope_scaling_type is None:
            return None
        given: dict[str, Any] = {name.removeprefix(PREFIX): model[name] for name in NAMES}
        given = {name: value for name, value in given.items() if value is not None}
        longest: int = model.max_position_embeddings or config.data.seq_length
        original = given.setdefault("original_max_position_embeddings", longest)
        given.setdefault("factor", longest / original)
        return cls(max_position_embeddings=longest, **given)

    @classmethod
    def _of_latent(cls, config: RunConfig) -> Self:
        """Build yarn from Megatron's multi-latent attention fields.

        ``attention_factor`` is set to the ratio of both magnitudes, also if ``mscale_all_dim`` is
        0.
        """
        model = config.model
        factor = model.rotary_scaling_factor
        return cls(
            type="yarn",
            max_position_embeddings=model.max_position_embeddings or config.data.seq_length,
            original_max_position_embeddings=model.original_max_position_embeddings,
            factor=factor,
            attention_factor=yarn_magnitude(factor, model.mscale)
            / yarn_magnitude(factor, model.mscale_all_dim),
            beta_fast=model.beta_fast,
            beta_slow=model.beta_slow,
        )

    def frequencies(self, width: int, base: float, seq_length: int) -> Tensor:
        """Return the angle of each pair at position 1: ``[P]``, float64."""
        plain = frequencies(width, base)
        if self.type == "linear":
            return plain / self.factor
        if self.type == "dynamic":
            longest = self.max_position_embeddings
            stretch = self.factor * max(seq_length, longest) / longest - (self.factor - 1.0)
            return frequencies(width, base * stretch ** (width / (width - 2)))
        if self.type == "yarn":
            ramp = self._ramp(width, base)
            return plain / self.factor * (1.0 - ramp) + plain * ramp
        if self.type == "llama3":
            return self._by_wavelength(plain)
        assert self.type == "longrope"
        is_long = seq_length > self.original_max_position_embeddings
        factors = self.long_factor if is_long else self.short_factor
        return plain / torch.tensor(factors, dtype=torch.float64)

    @property
    def magnitude(self) -> float:
        """Factor on cosines and sines; squared, it scales the attention scores."""
        if self.type not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1.0:
            return 1.0
        if self.type == "longrope":
            growth = math.log(self.factor)
            return math.sqrt(1.0 + growth / math.log(self.original_max_position_embeddings))
        if self.mscale and self.mscale_all_dim:
            both = (yarn_magnitude(self.factor, m) for m in (self.mscale, self.mscale_all_dim))
            return next(both) / next(both)
        return yarn_magnitude(self.factor, 1.0)

    def _ramp(self, width: int, base: float) -> Tensor:
        """Return yarn's ramp over pairs. Shape: ``[P]``.

        1 for pairs with many rotations over the original length, 0 for pairs with few, linear
        between.
        """

        def pair_of(rotations: float) -> float:
            """Return the (fractional) index of the pair with this number of rotations."""
            angle = 2.0 * math.pi * rotations / self.original_max_position_embeddings
            return -width * math.log(angle) / (2.0 * math.log(base))

        first, last = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        if first == last:
            last += 0.001  # as in Hugging Face, avoids a division by zero
        pairs = torch.arange(width // 2, dtype=torch.float64)
        return 1.0 - ((pairs - first) / (last - first)).clamp(0.0, 1.0)

    def _by_wavelength(self, plain: Tensor) -> Tensor:
        """Divide angles of long wavelengths by the factor, keep short ones, interpolate."""
        # Rotations of each pair over the original length.
        rotations = self.original_max_position_embeddings * plain / (2.0 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        ramp = ((rotations - low) / (high - low)).clamp(0.0, 1.0)
        return plain / self.factor * (1.0 - ramp) + plain * ramp


def frequencies(width: int, base: float) -> Tensor:
    """Return ``base ** (-2 i / R)``, the angle of pair i at position 1: ``[P]``, float64."""
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
    return base**-exponents
