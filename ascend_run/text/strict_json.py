"""Strict JSON: no duplicate keys, no NaN, one canonical encoding of each value. Torch-free."""

from __future__ import annotations

import json
from typing import Any, NoReturn


def render(value: Any) -> bytes:
    """Encode a JSON value canonically: one line, sorted keys, trailing newline."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"


def parse(data: bytes) -> Any:
    """Parse JSON.

    Raises:
        ValueError: The data is not JSON, has a duplicate key, NaN or infinity, or is nested too
            deep.
    """
    try:
        return json.loads(
            data.decode(), object_pairs_hook=unique_keys, parse_constant=_reject_constant
        )
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def value_problems(value: Any, name: str) -> list[str]:
    """Return why a value does not survive a JSON round trip, with the location of each problem."""
    if value is None or type(value) in (bool, int, str):
        return []
    if type(value) is float:
        finite = value == value and abs(value) != float("inf")
        return [] if finite else [f"{name}: {value} is not a number that JSON has"]
    if type(value) is list:
        return [p for i, item in enumerate(value) for p in value_problems(item, f"{name}[{i}]")]
    if type(value) is dict:
        problems = [
            f"{name}: the key {key!r} is not a string" for key in value if type(key) is not str
        ]
        for key, item in value.items():
            problems += value_problems(item, f"{name}.{key}")
        return problems
    kind = type(value).__name__
    expected = "None, bool, int, float, str, list, dict, or a TensorShard"
    return [f"{name}: {kind} is not JSON; use {expected}"]


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Build an object from its pairs; an ``object_pairs_hook`` of ``json.loads``.

    Raises:
        ValueError: A key is duplicated.
    """
    table = dict(pairs)
    if len(table) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise ValueError(f"the key {twice[0]!r} is given twice")
    return table


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
