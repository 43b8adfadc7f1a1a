"""Encode metrics as standard JSON; non-finite numbers become strings."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

_NOT_FINITE: Final[Mapping[str, float]] = {
    "NaN": math.nan,
    "Infinity": math.inf,
    "-Infinity": -math.inf,
}


def to_json(values: Mapping[str, object]) -> str:
    """Encode values as one line of JSON.

    Tensors and numpy values become numbers or lists; NaN and infinities become the strings ``NaN``,
    ``Infinity`` and ``-Infinity``; other types become their string form.
    """
    return json.dumps(_plain(values), ensure_ascii=False, allow_nan=False, separators=(", ", ": "))


def number(value: Any) -> float | None:
    """Decode a number from such a line; return None if it is not a number."""
    if isinstance(value, str):
        return _NOT_FINITE.get(value)
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:  # an integer out of float range
            return None
    return None


def _plain(value: object) -> Any:
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy arrays and scalars, tensors
        return _plain(value.tolist())
    return str(value)
