"""Code that a mutation test changes."""

from __future__ import annotations

import functools


class Adder:
    """Adds a number; has a base, so that ``super()`` is a free variable."""

    def __init__(self, by: int) -> None:
        super().__init__()
        self.by = by

    def add(self, x: int) -> int:
        return self.by + x


@functools.cache
def cached(x: int) -> int:
    return x + 10
