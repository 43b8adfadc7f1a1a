"""Counting, around what does the work. No torch."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from ascend_run.plugin_api import PlatformOps


class Meter:
    """Counts by name, from one reading to the next."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, name: str, amount: int) -> None:
        self._counts[name] += amount

    def take(self) -> Mapping[str, float]:
        """What was counted since the last time."""
        taken, self._counts = self._counts, Counter()
        return {name: float(amount) for name, amount in taken.items()}

    def counting(self, operators: PlatformOps) -> PlatformOps:
        """The same operators, each call of which is counted as ``<operator>_calls``; an operator
        that the platform does not have stays absent."""
        there = {
            field.name: function
            for field in attrs.fields(PlatformOps)
            if callable(function := getattr(operators, field.name))
        }
        counted: dict[str, Any] = {
            name: self._counted(name, function) for name, function in there.items()
        }
        return attrs.evolve(operators, **counted)

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.add(f"{name}_calls", 1)
            return function(*args, **kwargs)

        return call
