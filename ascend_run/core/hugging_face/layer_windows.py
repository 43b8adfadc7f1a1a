"""Attention windows of layers in config.json and in ``[model]``. Torch-free.

Hugging Face names the kind of each layer (``layer_types``), or gives a bound between layers of both
kinds; ours is a flag of each layer, or None where all of them have the window, or none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

from ascend_run.ops.attention.layer_window import layer_window
from ascend_run.types.config import RunConfig

_FULL, _WINDOW = KINDS = ("full_attention", "sliding_attention")
_LAYERS: Final = "model.num_layers"


def num_keys(window: tuple[int, int] | None, config: RunConfig) -> int | None:
    """Return the number of keys that a query attends to, itself among them; None for all.

    Raises:
        ValueError: The window has no such number.
    """
    if not window:
        return None
    left, right = window
    if left < 0 or right:
        raise ValueError("only [keys before a query, 0] has a form")
    return left + 1


def kinds(config: RunConfig) -> list[str]:
    """Return the kind of each layer."""
    layers = range(config.model.num_layers)
    return [KINDS[layer_window(config.model, layer) is not None] for layer in layers]


def of_kinds(kinds: Any, values: Mapping[str, Any]) -> Any:
    """Return the flags for the kinds of layers; NOTHING if they are missing.

    Args:
        values: ``model.num_layers`` and ``model.window_size``, as of the functions below.

    Raises:
        ValueError: They are not a kind for each layer, or there is no window.
    """
    if kinds is None:
        return attrs.NOTHING
    layers = values[_LAYERS]
    if not (isinstance(kinds, list) and len(kinds) == layers and {*map(str, kinds)} <= {*KINDS}):
        raise ValueError(f"expected {' or '.join(KINDS)} for each of {layers} layers")
    if _WINDOW in kinds and not values.get("model.window_size"):
        raise ValueError("sliding_attention needs a sliding_window")
    return _flags([kind == _WINDOW for kind in kinds], values)


def from_layer(first: int, values: Mapping[str, Any]) -> Any:
    """Return the flags where the layers from ``first`` on have the window."""
    return _flags([layer >= first for layer in range(values[_LAYERS])], values)


def below_layer(end: int, values: Mapping[str, Any]) -> Any:
    """Return the flags where every other layer below ``end`` has the window, the first too."""
    return _flags([layer < end and layer % 2 == 0 for layer in range(values[_LAYERS])], values)


def after_last_full(flags: object, config: RunConfig) -> Any:
    """Return the inverse of ``from_layer``; NOTHING if no layer has the window."""
    return _after_last(_FULL, config) if config.model.window_size else attrs.NOTHING


def after_last_window(flags: object, config: RunConfig) -> Any:
    """Return the inverse of ``below_layer``; NOTHING if no layer has the window."""
    return _after_last(_WINDOW, config) if config.model.window_size else attrs.NOTHING


def _after_last(kind: str, config: RunConfig) -> int:
    return max((n for n, other in enumerate(kinds(config), 1) if other == kind), default=0)


def _flags(windows: Sequence[bool], values: Mapping[str, Any]) -> Any:
    has_flags = values.get("model.window_size") and not all(windows)
    return [int(window) for window in windows] if has_flags else None
