"""Keys of a config.json whose values have another form in ``[model]``. Torch-free.

``dense_layers_first``: number of leading layers without experts; ours has a flag per layer.
``expert_widths``: size of the shared experts in multiples of an expert's; ours is their size.
``negation``: ours is true where theirs is false.
``window``: number of keys that a query attends to, itself among them; ours counts those before it.
``window_or_0``: the same, where 0 is none. ``window_use``: whether there is one.
``window_from``: first of the layers that have the window, which are the last ones.
``window_below``: number of leading layers of which every other one has the window.
``layer_types``: ``sliding_attention`` or ``full_attention`` of each layer; ours is a flag of each.
``inverse_square_root``: ours is 1 / sqrt of theirs. ``softmax_scale``: theirs is never null.
``over_depth``: ours is theirs over the square root of the number of layers.
``base_width``: a hidden size; ours is the model's over it. ``groups``: theirs is never null.
``doubled``: ours is half of theirs. ``head_width``: null is the hidden size over the heads.
``rope_ratio``: the rotary base in multiples of 10000. ``reciprocal``: ours is 1 over theirs.
``topk_method``: ``greedy`` ignores groups of experts; ours is null then.
``log_n``: whether queries are scaled; ours is the length from which on they are.
``longrope_length``: original length of longrope, of no effect with other positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs

from ascend_run.core.config.latent_attention import head_widths
from ascend_run.core.hugging_face import expert_keys, layer_windows
from ascend_run.core.hugging_face.derived_fields import model_value
from ascend_run.plugin_api.contracts import ConfigKey
from ascend_run.plugin_api.error_text import show
from ascend_run.types.config import RunConfig

FROM_ZERO: Final = frozenset(
    {"dense_layers_first", "expert_widths", "window_or_0", "window_from", "window_below"}
)
"""Forms whose count may be 0."""


def to_ours(key: ConfigKey, value: Any, values: Mapping[str, Any]) -> Any:
    """Convert a value to our form; NOTHING leaves the family's default.

    Args:
        values: Values of all keys without a form and of those before this one, by field.

    Raises:
        ValueError: The value is not one of this form; states what was expected.
    """
    return _FORMS[key.form].to_ours(value, values)


def to_theirs(key: ConfigKey, config: RunConfig) -> Any:
    """Convert our form to theirs.

    Raises:
        ValueError: The model has no such value; states the reason.
    """
    value = model_value(config, key.field.removeprefix("model."))
    try:
        theirs = _FORMS[key.form].to_theirs(value, config)
    except ValueError as problem:
        raise ValueError(f"{key.field} is {show(value)}; {problem}") from None
    return key.default if theirs is attrs.NOTHING else theirs


def _positive(factor: float) -> float:
    if factor <= 0:
        raise ValueError("expected a number above 0")
    return float(factor)


def _softmax_scale(scale: float | None, config: RunConfig) -> float:
    return float(scale or head_widths(config.model).key ** -0.5)


def _log_n(length: int | None, config: RunConfig) -> bool:
    if length not in (None, longest := model_value(config, "max_position_embeddings")):
        raise ValueError(f"only {longest}, the maximum length, has a form")
    return length is not None


def _longrope_length(length: int, values: Mapping[str, Any]) -> Any:
    is_longrope = values.get("model.rope_scaling_type") == "longrope"
    given = values.get("model.rope_scaling_original_max_position_embeddings")
    return (given or length) if is_longrope else attrs.NOTHING


def _whole(value: float) -> float | int:
    """Round to 12 digits, which undoes the error of a computation and its inverse."""
    rounded = float(f"{value:.12g}")
    return int(rounded) if rounded.is_integer() else rounded


@attrs.frozen
class _Form:
    to_ours: Callable[[Any, Mapping[str, Any]], Any]
    to_theirs: Callable[[Any, RunConfig], Any]
    """Takes our value; NOTHING is the key's default."""


_FORMS: Final[Mapping[str, _Form]] = {
    "dense_layers_first": _Form(expert_keys.flags_of_dense, expert_keys.dense_layers),
    "expert_widths": _Form(
        lambda count, values: count * values["model.moe_ffn_hidden_size"] or None,
        expert_keys.widths,
    ),
    "negation": _Form(lambda value, values: not value, lambda value, config: not value),
    "window": _Form(lambda keys, values: keys and (keys - 1, 0), layer_windows.num_keys),
    "window_or_0": _Form(
        lambda keys, values: (keys - 1, 0) if keys else None, layer_windows.num_keys
    ),
    "window_use": _Form(
        lambda used, values: attrs.NOTHING if used else None,
        lambda window, config: bool(window),
    ),
    "window_from": _Form(layer_windows.from_layer, layer_windows.after_last_full),
    "window_below": _Form(layer_windows.below_layer, layer_windows.after_last_window),
    "layer_types": _Form(layer_windows.of_kinds, lambda flags, config: layer_windows.kinds(config)),
    "softmax_scale": _Form(lambda scale, values: _positive(scale), _softmax_scale),
    "inverse_square_root": _Form(
        lambda scalar, values: _positive(scalar) ** -0.5,
        lambda scale, config: _whole(_softmax_scale(scale, config) ** -2),
    ),
    "reciprocal": _Form(
        lambda scale, values: 1.0 / _positive(scale), lambda divisor, config: 1.0 / divisor
    ),
    "over_depth": _Form(
        lambda scale, values: scale / math.sqrt(values["model.num_layers"]),
        lambda factor, config: float(_whole(factor * math.sqrt(config.model.num_layers))),
    ),
    "base_width": _Form(
        lambda width, values: values["model.hidden_size"] / width,
        lambda divisor, config: _whole(config.model.hidden_size / divisor),
    ),
    "doubled": _Form(lambda width, values: width // 2, lambda width, config: 2 * width),
    "head_width": _Form(
        lambda width, values: (
            width or values["model.hidden_size"] // values["model.num_attention_heads"]
        ),
        lambda width, config: width,
    ),
    "rope_ratio": _Form(
        lambda ratio, values: 10000.0 * ratio,
        lambda base, config: float(_whole(base / 10000.0)),
    ),
    "groups": _Form(lambda count, values: count, expert_keys.num_groups),
    "topk_method": _Form(
        expert_keys.kept_groups,
        lambda kept, config: "group_limited_greedy" if kept else "greedy",
    ),
    "log_n": _Form(
        lambda used, values: values["model.max_position_embeddings"] if used else None, _log_n
    ),
    "longrope_length": _Form(_longrope_length, lambda length, config: length or attrs.NOTHING),
}
