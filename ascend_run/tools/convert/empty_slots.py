"""Layer slots that features of a run leave empty: a converted model has none. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Final

from ascend_run.plugin_api.expert_layers import moe_layers
from ascend_run.plugin_api.layer_window import layer_window
from ascend_run.types.config import FieldSection

_LAYER: Final = re.compile(r"decoder\.layers\.(\d+)\.")


def count_layers(parameters: Iterable[str]) -> int:
    """Return how many layers have these parameters, which are numbered without empty slots."""
    return max(
        (int(found[1]) + 1 for name in parameters if (found := _LAYER.match(name))), default=0
    )


def values_without(model: FieldSection, empty: Collection[int]) -> dict[str, object]:
    """Return the fields of ``[model]`` that count layer slots, for a model of the layers alone.

    Args:
        model: Its ``num_layers`` counts the empty slots, too.
        empty: Slots from 0.
    """
    slots = [slot for slot in range(model.num_layers) if slot not in empty]
    values: dict[str, object] = {"model.num_layers": len(slots)}
    if model.num_moe_experts:
        sparse = [int(slot in moe_layers(model)) for slot in slots]
        values["model.moe_layer_freq"] = sparse if 0 in sparse else 1
    if model.window_size and model.window_attn_skip_freq is not None:
        windows = [int(layer_window(model, slot) is not None) for slot in slots]
        values["model.window_attn_skip_freq"] = windows
    return values
