"""Keys of a config.json that count what ``[model]`` has in another form. Torch-free.

``dense_layers_first``: how many layers at the beginning have no experts; ours has a flag for each
layer. ``expert_widths``: how many experts' widths the shared experts are wide together; ours is
their width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ascend_run.core.config.expert_layers import moe_layers
from ascend_run.core.config.value_types import show
from ascend_run.plugin_api.config import RunConfig
from ascend_run.plugin_api.contracts import ConfigKey

from .derived_fields import model_value

FROM_ZERO: Final = frozenset({"dense_layers_first", "expert_widths"})
"""Forms whose count may be 0."""


def to_ours(key: ConfigKey, count: int, values: Mapping[str, Any]) -> Any:
    """Args:
    values: Of all other keys, by field.
    """
    if key.form == "dense_layers_first":
        layers = values["model.num_layers"]
        return [int(layer >= count) for layer in range(layers)] if count else 1
    assert key.form == "expert_widths", f"{key.hf}: no form {key.form!r}"
    return count * values["model.moe_ffn_hidden_size"] or None


def to_theirs(key: ConfigKey, config: RunConfig) -> int:
    """Raises:
    ValueError: The model has no such count; with the reason.
    """
    if key.form == "dense_layers_first":
        layers, experts = config.model.num_layers, moe_layers(config)
        dense = layers - len(experts)
        if experts != {*range(dense, layers)}:
            frequency = show(config.model.moe_layer_freq)
            raise ValueError(
                f"{key.field} is {frequency}; only the first layers can be without experts"
            )
        return dense
    width = model_value(config, "moe_ffn_hidden_size")
    shared = model_value(config, key.field.removeprefix("model.")) or 0
    if shared % width:
        raise ValueError(f"{key.field} is {shared}; expected a multiple of {width}, an expert's")
    return int(shared // width)
