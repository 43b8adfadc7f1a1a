"""Fields of a request's body, checked one by one. Imports no torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from .errors import ApiError

_MOST_SHOWN: Final = 60
"""Characters of a wrong value in a message."""


def parsed(content: bytes) -> Mapping[str, Any]:
    """Return the object of a body.

    Raises:
        ApiError: It is no JSON object, or has text that is no Unicode.
    """
    try:
        body = json.loads(content, parse_constant=_no_number)
        json.dumps(body, ensure_ascii=False).encode()  # a surrogate alone cannot be encoded
    except RecursionError:
        raise ApiError("the body is nested too deeply") from None
    except ValueError as problem:
        raise ApiError(f"the body is no JSON in UTF-8: {problem}") from None
    if not isinstance(body, dict):
        raise ApiError("the body is no JSON object")
    return body


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number")


class Fields:
    """The fields of a body that have not been read; one that is null counts as left out."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._left = {name: value for name, value in body.items() if value is not None}

    def any(self, name: str) -> Any:
        """Return a field as it is; None: it is left out."""
        return self._left.pop(name, None)

    def integer(self, name: str, low: int, high: int | None = None) -> int | None:
        """
        Raises:
            ApiError: It is no integer, or out of range.
        """
        value = self.any(name)
        if value is None:
            return None
        expected = f"an integer of at least {low}"
        if high is not None:
            expected = f"an integer from {low} to {high}"
        holds = isinstance(value, int) and not isinstance(value, bool)
        if not holds or value < low or (high is not None and value > high):
            raise wrong(name, value, expected)
        return int(value)

    def number(self, name: str, low: float, high: float = sys.float_info.max) -> float | None:
        """
        Raises:
            ApiError: It is no number, or out of range.
        """
        value = self.any(name)
        if value is None:
            return None
        holds = isinstance(value, int | float) and not isinstance(value, bool)
        if not holds or not low <= value <= high:
            is_open = high == sys.float_info.max
            limit = f"of at least {low:g}" if is_open else f"from {low:g} to {high:g}"
            raise wrong(name, value, f"a number {limit}")
        return float(value)

    def truth(self, name: str) -> bool:
        """
        Raises:
            ApiError: It is neither true nor false.
        """
        value = self.any(name)
        if value is not None and not isinstance(value, bool):
            raise wrong(name, value, "true or false")
        return bool(value)

    def text(self, name: str) -> str | None:
        """
        Raises:
            ApiError: It is no text.
        """
        value = self.any(name)
        if value is not None and not isinstance(value, str):
            raise wrong(name, value, "a string")
        return value

    def without_effect(self, neutral: Mapping[str, Callable[[Any], bool]]) -> None:
        """Read fields of features that are not supported: a value that changes nothing passes.

        Raises:
            ApiError: One would change the answer.
        """
        for name, changes_nothing in neutral.items():
            value = self.any(name)
            if value is not None and not changes_nothing(value):
                raise ApiError(f"{name}={shown(value)} is not supported; leave it out", param=name)

    def finish(self) -> None:
        """
        Raises:
            ApiError: A field has not been read, so it is unknown.
        """
        for name in self._left:
            raise ApiError(f"unknown field {shown(name)}; leave it out", param=name)


def wrong(name: str, value: object, expected: str) -> ApiError:
    """Return the error of a value that is not what was expected."""
    return ApiError(f"{name}={shown(value)}: expected {expected}", param=name)


def shown(value: object) -> str:
    """Return a value as JSON, cut off where it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "..."
