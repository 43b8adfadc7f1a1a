"""Keys of ``[model]`` that stretch rotary positions over longer sequences, and how they fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import attrs

from ascend_run.plugin_api.config import RunConfig

from .latent_attention import head_widths
from .value_types import show

_above_0: Any = attrs.validators.optional(attrs.validators.gt(0))

PREFIX: Final = "rope_scaling_"
SCALINGS: Final = ("linear", "dynamic", "yarn", "llama3", "longrope")
"""The words of Hugging Face's ``rope_type``."""


@attrs.frozen(kw_only=True)
class RotaryScalingKeys:
    """Hugging Face's parameters of a scaled rope, each behind ``rope_scaling_``."""

    rope_scaling_type: str | None = attrs.field(
        default=None,
        validator=attrs.validators.optional(attrs.validators.in_(SCALINGS)),
    )
    """How rotary positions are stretched: ``linear`` (all angles), ``dynamic`` (the base, by the
    length of the sequence), ``yarn``, ``llama3`` (angles by their wavelength), ``longrope`` (a
    factor for each pair); none: not at all."""
    rope_scaling_factor: float | None = attrs.field(default=None, validator=_above_0)
    """How many times longer; for yarn and longrope, without it, ``max_position_embeddings`` over
    the original one."""
    rope_scaling_original_max_position_embeddings: int | None = attrs.field(
        default=None, validator=_above_0
    )
    """Length before stretching (yarn, llama3, longrope); default: ``max_position_embeddings``.
    Unit: tokens."""
    rope_scaling_attention_factor: float | None = attrs.field(default=None, validator=_above_0)
    """Multiplies cosines and sines (yarn, longrope); default: what the factor gives."""
    rope_scaling_beta_fast: float | None = attrs.field(default=None, validator=_above_0)
    """Turns over the original length above which yarn leaves an angle alone; default: 32."""
    rope_scaling_beta_slow: float | None = attrs.field(default=None, validator=_above_0)
    """Turns below which yarn divides an angle by the factor; default: 1."""
    rope_scaling_mscale: float | None = attrs.field(default=None, validator=_above_0)
    """With the next one: yarn's attention factor is the quotient of both magnitudes."""
    rope_scaling_mscale_all_dim: float | None = attrs.field(default=None, validator=_above_0)
    rope_scaling_truncate: bool | None = None
    """Round yarn's borders between the two to whole pairs; default: true."""
    rope_scaling_low_freq_factor: float | None = attrs.field(default=None, validator=_above_0)
    """Wavelengths over the original length by this are divided by the factor (llama3)."""
    rope_scaling_high_freq_factor: float | None = attrs.field(default=None, validator=_above_0)
    """Wavelengths under the original length by this are left alone (llama3)."""
    rope_scaling_short_factor: tuple[float, ...] | None = None
    """What longrope divides each pair's angle by, up to the original length."""
    rope_scaling_long_factor: tuple[float, ...] | None = None
    """The same for longer sequences."""


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
    "longrope": (*_COMMON, "attention_factor", "short_factor", "long_factor"),
}
"""Scaling -> what it reads."""
REQUIRED: Final[dict[str, tuple[str, ...]]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}


def rotary_problems(config: RunConfig) -> Iterator[str]:
    """A sentence for each parameter that is missing, idle or of the wrong size."""
    model = config.model
    kind = model.rope_scaling_type
    given = [name for name in NAMES[1:] if model.get(name) is not None]
    if kind is None or model.position_embedding_type != "rope":
        why = "rope_scaling_type" if kind is None else "position_embedding_type=rope"
        idle = given if kind is None else [NAMES[0], *given]
        yield from (f"model.{name}={show(model.get(name))} needs model.{why}" for name in idle)
        return
    for name in given:
        if name.removeprefix(PREFIX) not in PARAMETERS[kind]:
            yield f"model.{name} is not read by model.rope_scaling_type={kind}; leave it out"
    for name in REQUIRED[kind]:
        if model.get(f"{PREFIX}{name}") is None:
            yield f"model.rope_scaling_type={kind} needs model.{PREFIX}{name}"
    low, high = model.rope_scaling_low_freq_factor, model.rope_scaling_high_freq_factor
    if kind == "llama3" and low and high and not low < high:
        yield (
            f"model.rope_scaling_low_freq_factor={low} must be below "
            f"model.rope_scaling_high_freq_factor={high}"
        )
    width = head_widths(model).rotated
    if kind == "dynamic" and width <= 2:
        yield f"model.rope_scaling_type=dynamic needs 2 pairs in a head, not {width // 2}"
    for name in ("short_factor", "long_factor"):
        factors = model.get(f"{PREFIX}{name}")
        if kind == "longrope" and factors is not None:
            if len(factors) != width // 2:
                numbers = f"model.{PREFIX}{name} has {len(factors)} numbers"
                yield f"{numbers}; a head has {width // 2} pairs"
            if not all(factor > 0 for factor in factors):
                yield f"model.{PREFIX}{name}={show(factors)} must be above 0 throughout"
