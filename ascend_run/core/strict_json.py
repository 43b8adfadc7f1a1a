"""JSON that means one thing: no duplicate keys, no NaN, one way to write each value. Torch-free."""

from __future__ import annotations

import json
from typing import Any, NoReturn


def render(value: Any) -> bytes:
    """The one byte string for a JSON value: one line, keys sorted, ending in a newline."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"


def parse(data: bytes) -> Any:
    """Read JSON.

    Raises:
        ValueError: It is not JSON, gives a key twice, holds NaN or an infinity, or nests too deep.
    """
    try:
        return json.loads(
            data.decode(), object_pairs_hook=unique_keys, parse_constant=_refuse_constant
        )
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def value_problems(value: Any, name: str) -> list[str]:
    """Why a value would not come back from JSON as it went in, naming every place."""
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
    return [f"{name}: {kind} is not JSON; use None, bool, int, float, str, list, dict, or a piece"]


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For ``json.loads``: an object that gives no key twice.

    Raises:
        ValueError: It gives one twice.
    """
    table = dict(pairs)
    if len(table) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise ValueError(f"the key {twice[0]!r} is given twice")
    return table


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
