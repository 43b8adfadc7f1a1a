"""The angles of scaled rotary positions, as the configs of Hugging Face name them.

Sources: linear, arXiv:2306.15595; dynamic NTK and yarn, arXiv:2309.00071; longrope,
arXiv:2402.13753; llama3, arXiv:2407.21783 and its published code.
"""

# R rotated width of a head, P = R / 2 pairs

from __future__ import annotations

import math
from typing import Self

import attrs
import torch
from torch import Tensor

from ascend_run.core.config.latent_attention import yarn_magnitude
from ascend_run.core.config.rotary_keys import NAMES, PREFIX
from ascend_run.plugin_api.config import RunConfig


@attrs.frozen(kw_only=True)
class RotaryScaling:
    """One scaling with its parameters; see ``core.config.rotary_keys``."""

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
        """What a run's model asks for; None where its positions are not scaled."""
        model = config.model
        if model.get("multi_latent_attention"):
            return cls._of_latent(config)
        if model.rope_scaling_type is None:
            return None
        given = {name.removeprefix(PREFIX): model.get(name) for name in NAMES}
        given = {name: value for name, value in given.items() if value is not None}
        longest = model.max_position_embeddings or config.data.seq_length
        original = given.setdefault("original_max_position_embeddings", longest)
        given.setdefault("factor", longest / original)
        return cls(max_position_embeddings=longest, **given)

    @classmethod
    def _of_latent(cls, config: RunConfig) -> Self | None:
        """Megatron's fields for multi-latent attention: yarn, and what becomes of both magnitudes
        where ``mscale_all_dim`` is 0."""
        model = config.model
        if model.rope_type != "yarn":
            return None
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
        """[P] float64: the angle of each pair at position 1, in a sequence of this length."""
        plain = frequencies(width, base)
        if self.type == "linear":
            return plain / self.factor
        if self.type == "dynamic":
            longest = self.max_position_embeddings
            stretch = self.factor * max(seq_length, longest) / longest - (self.factor - 1.0)
            return frequencies(width, base * stretch ** (width / (width - 2)))
        if self.type == "yarn":
            kept = self._kept(width, base)
            return plain / self.factor * (1.0 - kept) + plain * kept
        if self.type == "llama3":
            return self._by_wavelength(plain)
        assert self.type == "longrope"
        is_long = seq_length > self.original_max_position_embeddings
        factors = self.long_factor if is_long else self.short_factor
        return plain / torch.tensor(factors, dtype=torch.float64)

    @property
    def magnitude(self) -> float:
        """Factor on cosines and sines, and so, squared, on the scores."""
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

    def _kept(self, width: int, base: float) -> Tensor:
        """[P], yarn: 1 for pairs that turn often over the original length, 0 for those that hardly
        do, on a line between."""

        def pair_with(turns: float) -> float:
            """The pair, as a real number, that turns so often."""
            angle = 2.0 * math.pi * turns / self.original_max_position_embeddings
            return -width * math.log(angle) / (2.0 * math.log(base))

        first, last = pair_with(self.beta_fast), pair_with(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        if first == last:
            last += 0.001  # Hugging Face's, where the line would have no length
        pairs = torch.arange(width // 2, dtype=torch.float64)
        return 1.0 - ((pairs - first) / (last - first)).clamp(0.0, 1.0)

    def _by_wavelength(self, plain: Tensor) -> Tensor:
        """Long waves are stretched, short ones not, and those between in part."""
        # Waves in the original length, of each pair.
        waves = self.original_max_position_embeddings * plain / (2.0 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        kept = ((waves - low) / (high - low)).clamp(0.0, 1.0)
        return plain / self.factor * (1.0 - kept) + plain * kept


def frequencies(width: int, base: float) -> Tensor:
    """[P] float64: ``base ** (-2 i / R)``, the angle of pair i at position 1."""
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
    return base**-exponents
