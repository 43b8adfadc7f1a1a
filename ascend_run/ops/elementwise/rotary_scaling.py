"""Angles of scaled rotary positions.

Sources: linear, arXiv:2306.15595; dynamic NTK and yarn, arXiv:2309.00071; longrope,
arXiv:2402.13753; llama3, arXiv:2407.21783 and its published code.
"""

# R rotary dim of a head, P = R / 2 pairs

from __future__ import annotations

import math

import attrs
import torch
from torch import Tensor


@attrs.frozen(kw_only=True)
class RotaryScaling:
    """One RoPE scaling with its parameters, by the names of Hugging Face configs."""

    type: str
    max_position_embeddings: int
    original_max_position_embeddings: int
    factor: float
    attention_factor: float = 1.0
    """Factor on cosines and sines; squared, it scales the attention scores."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    short_mscale: float | None = None
    """Replaces ``attention_factor`` up to the original length."""
    long_mscale: float | None = None
    """Replaces it for longer sequences."""

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
        factors = self.long_factor if self._is_long(seq_length) else self.short_factor
        return plain / torch.tensor(factors, dtype=torch.float64)

    def magnitude(self, seq_length: int) -> float:
        """Return the factor on cosines and sines of a sequence."""
        mscale = self.long_mscale if self._is_long(seq_length) else self.short_mscale
        return self.attention_factor if mscale is None else mscale

    def _is_long(self, seq_length: int) -> bool:
        return seq_length > self.original_max_position_embeddings

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
