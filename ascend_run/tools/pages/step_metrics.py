"""The metrics of one step, as ``metrics.jsonl`` has them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs

from ascend_run.core.log.json_values import number


@attrs.frozen
class StepMetrics:
    """A line of the file; its numbers are read when they are asked for."""

    step: int
    values: Mapping[str, object]
    """Everything on the line by name, those of plugins too."""

    @classmethod
    def of_line(cls, line: Mapping[str, Any]) -> StepMetrics:
        """Build the record from a line, which has a step."""
        return cls(line["step"], line)

    def number(self, metric: str) -> float | None:
        """Return a metric, which may be NaN or infinite; None if it is missing or not a number."""
        return number(self.values.get(metric))

    @property
    def expert_load(self) -> list[float] | None:
        """Share of the tokens of each expert; None if the line does not have it."""
        return _finite(self.values.get("expert_load")) or None

    @property
    def expert_load_by_layer(self) -> list[list[float]] | None:
        """The same for each layer, empty for one without experts; None if the line does not have
        it."""
        layers = self.values.get("expert_load_by_layer")
        found = [_finite(layer) for layer in layers] if isinstance(layers, list) else [None]
        known = [layer for layer in found if layer is not None]
        return known if len(known) == len(found) else None


def _finite(values: object) -> list[float] | None:
    """Return a list of finite numbers; None if it is anything else."""
    if not isinstance(values, list):
        return None
    numbers = [number(value) for value in values]
    known = [found for found in numbers if found is not None and math.isfinite(found)]
    return known if len(known) == len(numbers) else None
