"""The scaling of rotary positions that a run's config names."""

from __future__ import annotations

import math
from typing import Any

from ascend_run.core.config.latent_attention import yarn_magnitude
from ascend_run.core.config.rotary_keys import NAMES, PREFIX
from ascend_run.ops.elementwise.rotary_scaling import RotaryScaling
from ascend_run.types.config import RunConfig


def rotary_scaling(config: RunConfig) -> RotaryScaling | None:
    """Return the scaling of a run's model, or None without one."""
    model = config.model
    longest: int = model.max_position_embeddings or config.data.seq_length
    if model.multi_latent_attention and model.rope_type == "yarn":
        return _of_latent(config, longest)
    if model.rope_scaling_type is None:
        return None
    given: dict[str, Any] = {name.removeprefix(PREFIX): model[name] for name in NAMES}
    given = {name: value for name, value in given.items() if value is not None}
    original = given.setdefault("original_max_position_embeddings", longest)
    given.setdefault("factor", longest / original)
    magnitudes = [given.pop(name, None) for name in ("mscale", "mscale_all_dim")]
    given.setdefault("attention_factor", _attention_factor(given, *magnitudes))
    return RotaryScaling(max_position_embeddings=longest, **given)


def _attention_factor(
    given: dict[str, Any], mscale: float | None, mscale_all_dim: float | None
) -> float:
    factor: float = given["factor"]
    if given["type"] not in ("yarn", "longrope") or factor <= 1.0:
        return 1.0
    if given["type"] == "longrope":
        original: int = given["original_max_position_embeddings"]
        return math.sqrt(1.0 + math.log(factor) / math.log(original))
    if mscale and mscale_all_dim:
        return yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all_dim)
    return yarn_magnitude(factor, 1.0)


def _of_latent(config: RunConfig, longest: int) -> RotaryScaling:
    """Build yarn from Megatron's multi-latent attention fields.

    ``attention_factor`` is the ratio of both magnitudes, also if ``mscale_all_dim`` is 0.
    """
    model = config.model
    factor = model.rotary_scaling_factor
    return RotaryScaling(
        type="yarn",
        max_position_embeddings=longest,
        original_max_position_embeddings=model.original_max_position_embeddings,
        factor=factor,
        attention_factor=yarn_magnitude(factor, model.mscale)
        / yarn_magnitude(factor, model.mscale_all_dim),
        beta_fast=model.beta_fast,
        beta_slow=model.beta_slow,
    )
