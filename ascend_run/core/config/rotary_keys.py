"""``[model]`` keys of RoPE scaling for longer sequences."""

from __future__ import annotations

from typing import Any, Final

import attrs

_above_0: Any = attrs.validators.optional(attrs.validators.gt(0))

MSCALES: Final = ("short_mscale", "long_mscale")
"""Parameters of longrope that few of Hugging Face's classes read."""
PREFIX: Final = "rope_scaling_"
SCALINGS: Final = ("linear", "dynamic", "yarn", "llama3", "longrope")
"""Values of Hugging Face's ``rope_type``."""


@attrs.frozen(kw_only=True)
class RotaryScalingKeys:
    """Hugging Face's RoPE scaling parameters, each prefixed with ``rope_scaling_``."""

    rope_scaling_type: str | None = attrs.field(
        default=None,
        validator=attrs.validators.optional(attrs.validators.in_(SCALINGS)),
    )
    """RoPE scaling: ``linear`` (all angles), ``dynamic`` (the base, by sequence length), ``yarn``,
    ``llama3`` (angles by wavelength), ``longrope`` (a factor per pair); none: no scaling."""
    rope_scaling_factor: float | None = attrs.field(default=None, validator=_above_0)
    """Factor of length extension; yarn and longrope default to ``max_position_embeddings`` over
    ``rope_scaling_original_max_position_embeddings``."""
    rope_scaling_original_max_position_embeddings: int | None = attrs.field(
        default=None, validator=_above_0
    )
    """Length before scaling (yarn, llama3, longrope); default: ``max_position_embeddings``. Unit:
    tokens."""
    rope_scaling_attention_factor: float | None = attrs.field(default=None, validator=_above_0)
    """Multiplies cosines and sines (yarn, longrope); default: derived from the factor."""
    rope_scaling_beta_fast: float | None = attrs.field(default=None, validator=_above_0)
    """Rotations over the original length above which yarn keeps an angle; default: 32."""
    rope_scaling_beta_slow: float | None = attrs.field(default=None, validator=_above_0)
    """Rotations below which yarn divides an angle by the factor; default: 1."""
    rope_scaling_mscale: float | None = attrs.field(default=None, validator=_above_0)
    """With the next one: yarn's attention factor is the ratio of both magnitudes."""
    rope_scaling_mscale_all_dim: float | None = attrs.field(default=None, validator=_above_0)
    rope_scaling_truncate: bool | None = None
    """Round yarn's two boundaries to integer pair indices; default: true."""
    rope_scaling_low_freq_factor: float | None = attrs.field(default=None, validator=_above_0)
    """llama3: angles with wavelengths above (original length / this) are divided by the factor."""
    rope_scaling_high_freq_factor: float | None = attrs.field(default=None, validator=_above_0)
    """llama3: angles with wavelengths below (original length / this) are kept."""
    rope_scaling_short_factor: tuple[float, ...] | None = None
    """Divisor of each pair's angle up to the original length (longrope)."""
    rope_scaling_long_factor: tuple[float, ...] | None = None
    """Divisor of each pair's angle for longer sequences (longrope)."""
    rope_scaling_short_mscale: float | None = attrs.field(default=None, validator=_above_0)
    """Multiplies cosines and sines up to the original length (longrope); default: as for other
    lengths, ``rope_scaling_attention_factor``."""
    rope_scaling_long_mscale: float | None = attrs.field(default=None, validator=_above_0)
    """The same for longer sequences (longrope)."""


NAMES: Final = tuple(attribute.name for attribute in attrs.fields(RotaryScalingKeys))
_COMMON: Final = ("factor", "original_max_position_embeddings")
PARAMETERS: Final[dict[str, tuple[str, ...]]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (
        *_COMMON,
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "llama3": (*_COMMON, "low_freq_factor", "high_freq_factor"),
    "longrope": (*_COMMON, "attention_factor", "short_factor", "long_factor", *MSCALES),
}
"""Maps each scaling to the parameters it reads."""
REQUIRED: Final[dict[str, tuple[str, ...]]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
