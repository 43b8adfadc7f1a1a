"""Keys of a config.json whose values have another form in ``[model]``. Torch-free.

``dense_layers_first``: number of leading layers without experts; ours has a flag per layer.
``expert_widths``: size of the shared experts in multiples of an expert's; ours is their size.
``negation``: ours is true where theirs is false.
``window``: number of keys that a query attends to, itself among them; ours counts those before it.
``layer_types``: ``sliding_attention`` or ``full_attention`` of each layer; ours is a flag of each.
``inverse_square_root``: ours is 1 / sqrt of theirs. ``softmax_scale``: theirs is never null.
``over_depth``: ours is theirs over the square root of the number of layers.
``base_width``: a hidden size; ours is the model's over it.
``doubled``: ours is half of theirs.
``rope_ratio``: the rotary base in multiples of 10000.
``longrope_length``: original length of longrope, of no effect with other positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs

from ascend_run.core.config.latent_attention import head_widths
from ascend_run.core.hugging_face.derived_fields import model_value
from ascend_run.plugin_api.attention_layers import layer_window
from ascend_run.plugin_api.contracts import ConfigKey
from ascend_run.plugin_api.error_text import show
from ascend_run.plugin_api.expert_layers import moe_layers
from ascend_run.types.config import FieldSection, RunConfig

FROM_ZERO: Final = frozenset({"dense_layers_first", "expert_widths"})
"""Forms whose count may be 0."""
_KINDS: Final = ("full_attention", "sliding_attention")


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


def _window(key: ConfigKey, config: RunConfig) -> int | None:
    window = config.model.window_size
    if not window:
        return None
    left, right = window
    if left < 0 or right:
        raise ValueError(f"{key.field} is {show(window)}; only [keys before a query, 0] has a form")
    return int(left + 1)


def _windows(kinds: Any, values: Mapping[str, Any]) -> Any:
    if kinds is None:
        return attrs.NOTHING
    layers = values["model.num_layers"]
    if not (isinstance(kinds, list) and len(kinds) == layers and {*map(str, kinds)} <= {*_KINDS}):
        raise ValueError(f"expected {' or '.join(_KINDS)} for each of {layers} layers")
    flags = [_KINDS.index(kind) for kind in kinds]
    if not values.get("model.window_size"):
        if any(flags):
            raise ValueError("sliding_attention needs a sliding_window")
        return None
    return None if all(flags) else flags


def _layer_types(key: ConfigKey, config: RunConfig) -> list[str]:
    layers = range(config.model.num_layers)
    return [_KINDS[layer_window(config.model, layer) is not None] for layer in layers]


def _softmax_scale(model: FieldSection) -> float:
    return float(model.softmax_scale or head_widths(model).key ** -0.5)


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
    "window": _Form(lambda keys, values: keys and (keys - 1, 0), _window),
    "layer_types": _Form(_windows, _layer_types),
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
    "longrope_length": _Form(
        _longrope_length,
        lambda key, config: (
            config.model.rope_scaling_original_max_position_embeddings or key.default
        ),
    ),
}
