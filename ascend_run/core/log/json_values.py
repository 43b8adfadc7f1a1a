"""Readings as JSON that every parser takes: what JSON has no number for becomes a string."""

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


def to_json(values: Mapping[str, Any]) -> str:
    """One line of JSON.

    Tensors and numpy values become numbers or lists, NaN and the infinities the strings ``NaN``,
    ``Infinity`` and ``-Infinity``; what else JSON does not know becomes its text.
    """
    return json.dumps(_plain(values), ensure_ascii=False, allow_nan=False, separators=(", ", ": "))


def number(value: Any) -> float | None:
    """The number that a value read from such a line stands for; None where it is not one."""
    if isinstance(value, str):
        return _NOT_FINITE.get(value)
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:  # an integer beyond every float
            return None
    return None


def _plain(value: Any) -> Any:
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
