"""Numbers that would work, for messages that say so."""

from __future__ import annotations


def divisors(number: int, at_most: int = 4096) -> list[int]:
    """Every divisor of a positive number up to a limit, ascending."""
    return [size for size in range(1, min(number, at_most) + 1) if number % size == 0]


def one_of(numbers: list[int]) -> str:
    """``1``, ``1 or 2``, ``1, 2, 5 or 10``; of many the first and the last few."""
    shown = [str(number) for number in numbers]
    if len(shown) > 10:
        shown = [*shown[:6], "...", *shown[-3:]]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"


def around(number: int, unit: int) -> str:
    """The multiples of a unit next to a number: ``96 or 128``."""
    below = number // unit * unit
    return one_of([below, below + unit] if below else [unit])
