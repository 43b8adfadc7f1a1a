"""Conditions on the config. No torch."""

from __future__ import annotations

from typing import Any

import attrs

from .api_version import COMPARISONS
from .config import RunConfig


@attrs.frozen
class Condition:
    """A comparison of one config value with a constant, such as ``num_moe_experts > 0``.

    Args:
        field: A config key, ``section.name`` (``model.num_moe_experts``).
        comparison: One of ``> >= < <= == !=``; None compares as 0.
        value: The constant to compare with.
        why: Why the plugin requires it, for the error message.
        fix: What the user can do, for the error message.
    """

    field: str
    comparison: str = attrs.field(validator=attrs.validators.in_(COMPARISONS))
    value: int | float | str | bool
    why: str = ""
    fix: str = ""

    @classmethod
    def one_rank(cls, size: str, why: str) -> Condition:
        """Return the condition that a parallel size is 1; for a plugin that is then idle.

        Args:
            size: A key of ``parallel``, such as ``context_parallel_size``.
        """
        return cls(f"parallel.{size}", "<=", 1, why=why, fix=f"set parallel.{size}")

    def holds(self, config: RunConfig) -> bool:
        """Return whether a config meets the condition."""
        section, _, name = self.field.partition(".")
        return self.compares(getattr(getattr(config, section), name))

    def compares(self, seen: Any) -> bool:
        """Return whether a value of the field meets the condition."""
        return COMPARISONS[self.comparison](0 if seen is None else seen, self.value)

    def __str__(self) -> str:
        return f"{self.field} {self.comparison} {self.value}"
