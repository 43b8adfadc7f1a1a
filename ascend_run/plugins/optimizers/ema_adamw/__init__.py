"""AdamW that also keeps an exponential moving average of the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from ascend_run.plugin_api import (
    LegacyFlag,
    Manifest,
    Maturity,
    Numerics,
    OptimizerSpec,
    OptimizerState,
    RunConfig,
    Support,
    hookimpl,
)

if TYPE_CHECKING:
    import torch


@attrs.frozen(kw_only=True)
class EmaAdamWConfig:
    """Options, set by ``plugins.ema-adamw.<field>=<value>``."""

    decay: float = attrs.field(
        default=0.9999, validator=[attrs.validators.ge(0.0), attrs.validators.le(1.0)]
    )
    """Factor of the average in each step; the new weights have one minus it."""
    warmup: bool = False
    """Use ``min(decay, (1 + step) / (10 + step))``, which forgets the first weights sooner."""


class EmaAdamW:
    """Keep an exponential moving average of the weights beside AdamW, which it leaves unchanged.

    Cost: 4 bytes per trained parameter, divided by the data-parallel ranks with the distributed
    optimizer; one more pass over the weights per step; no communication. Numerics: bitwise neutral;
    the average is read from checkpoints only.
    """

    manifest = Manifest(
        name="ema-adamw",
        summary="keep an exponential moving average of the weights in AdamW",
        numerics=Numerics.BITWISE,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.UNVERIFIED,
            "npu": Support.UNVERIFIED,
        },
        level=2,
        maturity=Maturity.BETA,
        legacy_flags=(
            LegacyFlag(flag="--optimizer-selection", values={"fused_ema_adamw": True}),
            LegacyFlag(flag="--ema-decay", key="plugins.ema-adamw.decay", values=None),
        ),
        source="arXiv:1711.05101; MindSpeed, fused_ema_adamw",
    )
    config_class = EmaAdamWConfig

    def __init__(self, config: EmaAdamWConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_optimizer(self, config: RunConfig) -> OptimizerSpec:
        options = config.optimizer

        def build(param_groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
            from .optimizer import EmaAdamWOptimizer

            return EmaAdamWOptimizer(
                param_groups,
                betas=(options.adam_beta1, options.adam_beta2),
                eps=options.adam_eps,
                ema_decay=self.config.decay,
                warmup=self.config.warmup,
            )

        states = {
            "step": OptimizerState(scalar=True),
            "exp_avg": OptimizerState(),
            "exp_avg_sq": OptimizerState(),
            "ema": OptimizerState(initial="parameter"),
        }
        return OptimizerSpec(build=build, states=states, element_wise=True)
