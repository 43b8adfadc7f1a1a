"""The size of the weights, averaged over the steps, among the readings of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from ascend_run.plugin_api import (
    CheckpointEntry,
    Manifest,
    Maturity,
    Metrics,
    Numerics,
    RunContext,
    Support,
    hookimpl,
)

if TYPE_CHECKING:
    from .average import Average


@attrs.frozen(kw_only=True)
class WeightDriftConfig:
    """Options, set by ``plugins.weight-drift.<field>=<value>``."""

    decay: float = attrs.field(
        default=0.5, validator=[attrs.validators.ge(0.0), attrs.validators.lt(1.0)]
    )
    """Share of the average that each step keeps; at least 0 and below 1."""


class WeightDrift:
    """Average the root mean square of this rank's weights over the steps. Numerics: bitwise
    neutral."""

    manifest = Manifest(
        name="weight-drift",
        summary="log the size of the weights, averaged over the steps",
        numerics=Numerics.BITWISE,
        platforms={"cpu": Support.REAL},
        level=2,
        maturity=Maturity.EXPERIMENTAL,
        requires_api=">=0,<1",
    )
    config_class = WeightDriftConfig

    def __init__(self, config: WeightDriftConfig) -> None:
        self.config = config
        self._made: Average | None = None

    @property
    def _average(self) -> Average:
        if self._made is None:
            from .average import Average  # imports torch, so not before it is needed

            self._made = Average(self.config.decay)
        return self._made

    @hookimpl
    def ascend_after_step(self, context: RunContext) -> None:
        self._average.add(context.models["policy"].chunks)

    @hookimpl
    def ascend_checkpoint_entries(self) -> Mapping[str, CheckpointEntry]:
        return {"weight-drift": self._average}

    @hookimpl
    def ascend_metrics(self) -> Mapping[str, Metrics]:
        return {"weight-drift": lambda context: {"rms": self._average.value.item()}}
