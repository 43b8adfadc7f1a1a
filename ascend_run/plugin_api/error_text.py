"""Values in error messages: the given one, and valid ones to suggest."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Final

NONE: Final = "none"
"""What a config file writes for an option without a value: TOML has no null."""
LARGEST: Final = 2**63 - 1
"""Largest integer that TOML has."""


def show(value: object) -> str:
    """A value in an error message: as TOML spells it, and short."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) > LARGEST:
        return "a very large number"
    return reprlib.repr(list(value) if isinstance(value, tuple) else value)


def divisors(number: int, at_most: int = 4096) -> list[int]:
    """Return the divisors of a positive number up to a limit, ascending."""
    return [size for size in range(1, min(number, at_most) + 1) if number % size == 0]


def one_of(numbers: list[int]) -> str:
    """Format as ``1``, ``1 or 2``, ``1, 2, 5 or 10``; long lists are abbreviated."""
    shown = [str(number) for number in numbers]
    if len(shown) > 10:
        shown = [*shown[:6], "...", *shown[-3:]]
    return listed(shown, "or")


def listed(words: Sequence[str], last: str) -> str:
    """Join words: ``a, b or c``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def cannot_split(name: str, size: int, over: str, parts: int) -> str:
    """Say that a size is not divisible by a number of parts, and which numbers divide it.

    Args:
        name, over: Options that hold the size and the number of parts.
    """
    return f"{name}={size} cannot be split over {over}={parts}; use {one_of(divisors(size))}"


def around(number: int, unit: int) -> str:
    """Format the multiples of ``unit`` next to a number: ``96 or 128``."""
    below = number // unit * unit
    return one_of([below, below + unit] if below else [unit])
