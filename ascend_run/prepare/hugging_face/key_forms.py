"""Keys of a config.json whose counts have another form in ``[model]``. Torch-free.

``dense_layers_first``: number of leading layers without experts; ours has a flag per layer.
``expert_widths``: size of the shared experts in multiples of an expert's; ours is their size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ascend_run.core.hugging_face.derived_fields import model_value
from ascend_run.plugin_api.contracts import ConfigKey
from ascend_run.plugin_api.error_text import show
from ascend_run.plugin_api.expert_layers import moe_layers
from ascend_run.types.config import RunConfig

FROM_ZERO: Final = frozenset({"dense_layers_first", "expert_widths"})
"""Forms whose count may be 0."""


def to_ours(key: ConfigKey, count: int, values: Mapping[str, Any]) -> Any:
    """Convert a count to our form.

    Args:
        values: Values of all other keys, by field.
    """
    if key.form == "dense_layers_first":
        layers = values["model.num_layers"]
        return [int(layer >= count) for layer in range(layers)] if count else 1
    assert key.form == "expert_widths", f"{key.hf}: no form {key.form!r}"
    return count * values["model.moe_ffn_hidden_size"] or None


def to_theirs(key: ConfigKey, config: RunConfig) -> int:
    """Convert our form to a count.

    Raises:
        ValueError: The model has no such count; states the reason.
    """
    if key.form == "dense_layers_first":
        layers, experts = config.model.num_layers, moe_layers(config.model)
        dense = layers - len(experts)
        if experts != {*range(dense, layers)}:
            frequency = show(config.model.moe_layer_freq)
            raise ValueError(
                f"{key.field} is {frequency}; only the first layers can be without experts"
            )
        number: int = dense
        return number
    width = model_value(config, "moe_ffn_hidden_size")
    shared = model_value(config, key.field.removeprefix("model.")) or 0
    if shared % width:
        raise ValueError(f"{key.field} is {shared}; expected a multiple of {width}, an expert's")
    return int(shared // width)
