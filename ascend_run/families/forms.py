"""Forms of numbers in a config.json that differ from those in ``[model]``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import attrs

from ascend_run.plugin_api import FieldSection, KeyForm


def _positive(factor: float) -> float:
    if factor <= 0:
        raise ValueError("expected a number above 0")
    return float(factor)


def _whole(value: float) -> float | int:
    """Round to 12 digits, which undoes the error of a computation and its inverse."""
    rounded = float(f"{value:.12g}")
    return int(rounded) if rounded.is_integer() else rounded


def _softmax_scale(scale: float | None, model: FieldSection) -> float:
    return float(scale or model.kv_channels**-0.5)


def _log_n(length: int | None, model: FieldSection) -> bool:
    if length not in (None, longest := model.max_position_embeddings):
        raise ValueError(f"only {longest}, the maximum length, has a form")
    return length is not None


def _longrope_length(length: int, values: Mapping[str, Any]) -> Any:
    is_longrope = values.get("model.rope_scaling_type") == "longrope"
    given = values.get("model.rope_scaling_original_max_position_embeddings")
    return (given or length) if is_longrope else attrs.NOTHING


NEGATION: Final = KeyForm(
    name="negation",
    to_ours=lambda value, values: not value,
    to_theirs=lambda value, model: not value,
)
"""Ours is true where theirs is false."""
DOUBLED: Final = KeyForm(
    name="doubled",
    to_ours=lambda width, values: width // 2,
    to_theirs=lambda width, model: 2 * width,
)
"""Ours is half of theirs."""
RECIPROCAL: Final = KeyForm(
    name="reciprocal",
    to_ours=lambda scale, values: 1.0 / _positive(scale),
    to_theirs=lambda divisor, model: 1.0 / divisor,
)
"""Ours is 1 over theirs."""
SOFTMAX_SCALE: Final = KeyForm(
    name="softmax_scale",
    to_ours=lambda scale, values: _positive(scale),
    to_theirs=_softmax_scale,
)
"""Theirs is never null."""
INVERSE_SQUARE_ROOT: Final = KeyForm(
    name="inverse_square_root",
    to_ours=lambda scalar, values: _positive(scalar) ** -0.5,
    to_theirs=lambda scale, model: _whole(_softmax_scale(scale, model) ** -2),
)
"""A softmax scale: ours is 1 over the square root of theirs, which is never null."""
OVER_DEPTH: Final = KeyForm(
    name="over_depth",
    to_ours=lambda scale, values: scale / math.sqrt(values["model.num_layers"]),
    to_theirs=lambda factor, model: float(_whole(factor * math.sqrt(model.num_layers))),
)
"""Ours is theirs over the square root of the number of layers."""
BASE_WIDTH: Final = KeyForm(
    name="base_width",
    to_ours=lambda width, values: values["model.hidden_size"] / width,
    to_theirs=lambda divisor, model: _whole(model.hidden_size / divisor),
)
"""Theirs is a hidden size; ours is the model's over it."""
HEAD_WIDTH: Final = KeyForm(
    name="head_width",
    to_ours=lambda width, values: (
        width or values["model.hidden_size"] // values["model.num_attention_heads"]
    ),
    to_theirs=lambda width, model: width,
)
"""Null is the hidden size over the number of heads."""
ROPE_RATIO: Final = KeyForm(
    name="rope_ratio",
    to_ours=lambda ratio, values: 10000.0 * ratio,
    to_theirs=lambda base, model: float(_whole(base / 10000.0)),
)
"""Theirs is the rotary base in multiples of 10000."""
LOG_N: Final = KeyForm(
    name="log_n",
    to_ours=lambda used, values: values["model.max_position_embeddings"] if used else None,
    to_theirs=_log_n,
)
"""Theirs is whether queries are scaled; ours is the length from which on they are."""
LONGROPE_LENGTH: Final = KeyForm(
    name="longrope_length",
    to_ours=_longrope_length,
    to_theirs=lambda length, model: length or attrs.NOTHING,
)
"""Original length of longrope, of no effect with other positions."""
