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
``base_width``: a hidden size; ours is the model's over it.
``doubled``: ours is half of theirs.
``rope_ratio``: the base in multiples of 10000. ``log_n``: whether queries are scaled from a length.
``longrope_length``: original length of longrope, of no effect with other positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import attrs

from ascend_run.core.config.latent_attention import head_widths
from ascend_run.core.hugging_face import layer_windows
from ascend_run.core.hugging_face.derived_fields import model_value
from ascend_run.plugin_api.contracts import ConfigKey
from ascend_run.plugin_api.error_text import show
from ascend_run.plugin_api.expert_layers import moe_layers
from ascend_run.types.config import FieldSection, RunConfig

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
    return _FORMS[key.form].to_theirs(key, config)


def _flags(dense: int, values: Mapping[str, Any]) -> Any:
    layers = values["model.num_layers"]
    return [int(layer >= dense) for layer in range(layers)] if dense else 1


def _dense_layers(key: ConfigKey, config: RunConfig) -> int:
    layers, experts = config.model.num_layers, moe_layers(config.model)
    dense: int = layers - len(experts)
    if experts != {*range(dense, layers)}:
        given = show(config.model.moe_layer_freq)
        raise ValueError(f"{key.field} is {given}; only the first layers can be without experts")
    return dense


def _expert_widths(key: ConfigKey, config: RunConfig) -> int:
    width = model_value(config, "moe_ffn_hidden_size")
    shared = model_value(config, key.field.removeprefix("model.")) or 0
    if shared % width:
        raise ValueError(f"{key.field} is {shared}; expected a multiple of {width}, an expert's")
    return int(shared // width)


def _softmax_scale(model: FieldSection) -> float:
    return float(model.softmax_scale or head_widths(model).key ** -0.5)


def _log_n(key: ConfigKey, config: RunConfig) -> bool:
    length = config.model.log_n_scaling_length
    if length not in (None, longest := model_value(config, "max_position_embeddings")):
        raise ValueError(f"{key.field} is {length}; only {longest}, the maximum length, has a form")
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
    to_theirs: Callable[[ConfigKey, RunConfig], Any]


_FORMS: Final[Mapping[str, _Form]] = {
    "dense_layers_first": _Form(_flags, _dense_layers),
    "expert_widths": _Form(
        lambda count, values: count * values["model.moe_ffn_hidden_size"] or None, _expert_widths
    ),
    "negation": _Form(
        lambda value, values: not value,
        lambda key, config: not config.model[key.field.removeprefix("model.")],
    ),
    **dict.fromkeys(
        ("window", "window_or_0"),
        _Form(
            lambda keys, values: (keys - 1, 0) if keys else None,
            lambda key, config: layer_windows.num_keys(config),
        ),
    ),
    "window_use": _Form(
        lambda used, values: attrs.NOTHING if used else None,
        lambda key, config: bool(config.model.window_size),
    ),
    "window_from": _Form(
        layer_windows.from_layer, partial(layer_windows.after_last, layer_windows.FULL)
    ),
    "window_below": _Form(
        layer_windows.below_layer, partial(layer_windows.after_last, layer_windows.WINDOW)
    ),
    "layer_types": _Form(layer_windows.of_kinds, lambda key, config: layer_windows.kinds(config)),
    "softmax_scale": _Form(
        lambda scale, values: float(scale), lambda key, config: _softmax_scale(config.model)
    ),
    "inverse_square_root": _Form(
        lambda scalar, values: scalar**-0.5,
        lambda key, config: _whole(_softmax_scale(config.model) ** -2),
    ),
    "over_depth": _Form(
        lambda scale, values: scale / math.sqrt(values["model.num_layers"]),
        lambda key, config: float(
            _whole(config.model.residual_multiplier * math.sqrt(config.model.num_layers))
        ),
    ),
    "base_width": _Form(
        lambda width, values: values["model.hidden_size"] / width,
        lambda key, config: _whole(config.model.hidden_size / config.model.logits_scaling),
    ),
    "doubled": _Form(
        lambda width, values: width // 2,
        lambda key, config: 2 * model_value(config, key.field.removeprefix("model.")),
    ),
    "rope_ratio": _Form(
        lambda ratio, values: 10000.0 * ratio,
        lambda key, config: float(_whole(config.model.rotary_base / 10000.0)),
    ),
    "log_n": _Form(
        lambda used, values: values["model.max_position_embeddings"] if used else None, _log_n
    ),
    "longrope_length": _Form(
        _longrope_length,
        lambda key, config: (
            config.model.rope_scaling_original_max_position_embeddings or key.default
        ),
    ),
}
