"""Keys of the attention window and of the layers that have it.

Hugging Face names the kind of each layer (``layer_types``), or gives a bound between layers of both
kinds; ours is a flag of each layer, or None where all of them have the window, or none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import attrs

from ascend_run.plugin_api import ConfigKey, FieldSection, KeyForm
from ascend_run.plugin_api.layer_window import layer_window

_FULL, _WINDOW = _KINDS = ("full_attention", "sliding_attention")
_LAYERS: Final = "model.num_layers"
_FLAGS: Final = "model.window_attn_skip_freq"


def _num_keys(window: tuple[int, int] | None, model: FieldSection) -> int | None:
    """Return the number of keys that a query attends to, itself among them; None for all."""
    if not window:
        return None
    left, right = window
    if left < 0 or right:
        raise ValueError("only [keys before a query, 0] has a form")
    return left + 1


def _flags(windows: Sequence[bool], values: Mapping[str, Any]) -> Any:
    has_flags = values.get("model.window_size") and not all(windows)
    return [int(window) for window in windows] if has_flags else None


def _of_kinds(kinds: Any, values: Mapping[str, Any]) -> Any:
    if kinds is None:
        return attrs.NOTHING
    layers = values[_LAYERS]
    if not (isinstance(kinds, list) and len(kinds) == layers and {*map(str, kinds)} <= {*_KINDS}):
        raise ValueError(f"expected {' or '.join(_KINDS)} for each of {layers} layers")
    if _WINDOW in kinds and not values.get("model.window_size"):
        raise ValueError("sliding_attention needs a sliding_window")
    return _flags([kind == _WINDOW for kind in kinds], values)


def _kinds(_: object, model: FieldSection) -> list[str]:
    return [_KINDS[layer_window(model, layer) is not None] for layer in range(model.num_layers)]


def _from_layer(first: int, values: Mapping[str, Any]) -> Any:
    return _flags([layer >= first for layer in range(values[_LAYERS])], values)


def _below_layer(end: int, values: Mapping[str, Any]) -> Any:
    return _flags([layer < end and layer % 2 == 0 for layer in range(values[_LAYERS])], values)


def _after_last(_: object, model: FieldSection, *, kind: str) -> Any:
    """Return the number of layers up to the last of a kind."""
    if not model.window_size:
        return attrs.NOTHING
    return max((n for n, other in enumerate(_kinds(_, model), 1) if other == kind), default=0)


WINDOW: Final = KeyForm(
    name="window",
    to_ours=lambda keys, values: keys and (keys - 1, 0),
    to_theirs=_num_keys,
)
"""Number of keys that a query attends to, itself among them; ours counts those before it."""
WINDOW_OR_0: Final = KeyForm(
    name="window_or_0",
    to_ours=lambda keys, values: (keys - 1, 0) if keys else None,
    to_theirs=_num_keys,
    least=0,
)
"""The same, where 0 is none."""
WINDOW_USE: Final = KeyForm(
    name="window_use",
    to_ours=lambda used, values: attrs.NOTHING if used else None,
    to_theirs=lambda window, model: bool(window),
)
"""Whether there is a window."""
WINDOW_FROM: Final = KeyForm(
    name="window_from",
    to_ours=_from_layer,
    to_theirs=partial(_after_last, kind=_FULL),
    least=0,
)
"""First of the layers that have the window, which are the last ones."""
WINDOW_BELOW: Final = KeyForm(
    name="window_below",
    to_ours=_below_layer,
    to_theirs=partial(_after_last, kind=_WINDOW),
    least=0,
)
"""Number of leading layers of which every other one has the window, the first too."""
LAYER_TYPES: Final = KeyForm(name="layer_types", to_ours=_of_kinds, to_theirs=_kinds, least=None)
"""The kind of each layer; null leaves the default."""


def sliding_window(
    default: int | None, form: KeyForm = WINDOW, *, also: str = ""
) -> tuple[ConfigKey, ...]:
    """Return the key of the attention window; ``also`` is another name of it."""
    return (
        ConfigKey(
            hf="sliding_window",
            field="model.window_size",
            default=default,
            nullable=True,
            form=form,
            also=also,
        ),
    )


def optional_window(bound: KeyForm | None = WINDOW_FROM) -> tuple[ConfigKey, ...]:
    """Return the keys of a window that ``use_sliding_window`` turns on, in some layers.

    Args:
        bound: Form of ``max_window_layers``, which ``layer_types`` overrides; None if every layer
            has the window, and neither is a key.
    """
    use = ConfigKey(
        hf="use_sliding_window", field="model.window_size", default=False, form=WINDOW_USE
    )
    of_layers = ConfigKey(hf="max_window_layers", field=_FLAGS, default=28, form=bound)
    by_layer = (of_layers, *layer_types()) if bound else ()
    return (*sliding_window(4096, WINDOW_OR_0), use, *by_layer)


def layer_types() -> tuple[ConfigKey, ...]:
    """Return the key of the layers that have the window; a missing one leaves the default."""
    return (ConfigKey(hf="layer_types", field=_FLAGS, default=None, form=LAYER_TYPES),)
