"""Momentum whose first steps are as large as the later ones."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from ascend_run.plugin_api import (
    Manifest,
    Maturity,
    Numerics,
    OptimizerSpec,
    OptimizerState,
    Support,
    hookimpl,
)

if TYPE_CHECKING:
    import torch


@attrs.frozen(kw_only=True)
class WarmMomentumConfig:
    """Options, set by ``plugins.warm-momentum.<field>=<value>``."""

    beta: float = attrs.field(
        default=0.9, validator=[attrs.validators.ge(0.0), attrs.validators.lt(1.0)]
    )
    """Share of the average that each step keeps; at least 0 and below 1."""


class WarmMomentum:
    """Step along the average of the gradients, divided by what it lacks in the first steps.
    Numerics: another optimizer, by design."""

    manifest = Manifest(
        name="warm-momentum",
        summary="SGD along an average of the gradients that is right from the first step",
        numerics=Numerics.MODEL,
        platforms={"cpu": Support.REAL},
        level=2,
        maturity=Maturity.EXPERIMENTAL,
        requires_api=">=0,<1",
    )
    config_class = WarmMomentumConfig

    def __init__(self, config: WarmMomentumConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_optimizer(self) -> OptimizerSpec:
        return OptimizerSpec(
            build=partial(_build, beta=self.config.beta),
            states={
                "average": OptimizerState(),
                "step": OptimizerState(scalar=True),
            },
            element_wise=True,
        )


def _build(groups: list[dict[str, Any]], beta: float) -> torch.optim.Optimizer:
    from .optimizer import AveragedGradients

    return AveragedGradients(groups, beta)
