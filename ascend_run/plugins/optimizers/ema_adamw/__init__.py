"""AdamW that keeps an exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
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
from ascend_run.plugins.optimizers import adamw_options

if TYPE_CHECKING:
    import torch

    from ascend_run.plugin_api import RunContext


@attrs.frozen(kw_only=True)
class EmaAdamWConfig:
    """Options, set by ``plugins.ema-adamw.<field>=<value>``."""

    decay: float = attrs.field(
        default=0.9999, validator=[attrs.validators.ge(0.0), attrs.validators.le(1.0)]
    )
    """Share of the average that each step keeps, from 0 to 1."""
    warmup: bool = False
    """In step t, counted from 1, keep ``min(decay, (1 + t) / (10 + t))``."""
    evaluate: bool = False
    """Evaluate with the averaged weights instead of those that train."""


class EmaAdamW:
    """Step like the built-in AdamW, then average the weights: ``ema = d * ema + (1 - d) * p``.

    Cost: one more state like the master weights, read and written in every step. Numerics: the
    weights that train have the bits of the built-in AdamW; the average is a second model. Source:
    MindSpeed's ``--optimizer-selection fused_ema_adamw``; Polyak and Juditsky 1992.
    """

    manifest = Manifest(
        name="ema-adamw",
        summary="AdamW that also keeps an exponential moving average of the weights",
        numerics=Numerics.MODEL,
        platforms={"cpu": Support.REAL, "cuda": Support.REAL, "npu": Support.UNVERIFIED},
        level=2,
        maturity=Maturity.BETA,
        legacy_flags=(
            LegacyFlag(flag="--optimizer-selection", values={"fused_ema_adamw": True}),
            LegacyFlag(flag="--ema-decay", key="plugins.ema-adamw.decay", values=None),
        ),
        source="MindSpeed, docs/features/fused_ema_adamw_optimizer.md",
    )
    config_class = EmaAdamWConfig

    def __init__(self, config: EmaAdamWConfig) -> None:
        self.config = config
        self._exchanged = False

    @hookimpl
    def ascend_check(self, config: RunConfig) -> Sequence[str]:
        problem = (
            "ema-adamw: plugins.ema-adamw.evaluate=true needs evaluations, and "
            "train.eval_interval=0 has none; set train.eval_interval, or leave out "
            "plugins.ema-adamw.evaluate"
        )
        return [problem] if self.config.evaluate and not config.train.eval_interval else []

    @hookimpl
    def ascend_optimizer(self, config: RunConfig) -> OptimizerSpec:
        return OptimizerSpec(
            build=partial(
                _build,
                **adamw_options(config),
                ema_decay=self.config.decay,
                ema_warmup=self.config.warmup,
            ),
            states={
                "step": OptimizerState(scalar=True),
                "exp_avg": OptimizerState(),
                "exp_avg_sq": OptimizerState(),
                "ema": OptimizerState(initial="parameter"),
            },
            element_wise=True,
        )

    @hookimpl
    def ascend_before_evaluation(self, context: RunContext) -> None:
        if self.config.evaluate:
            self._exchange(context)

    @hookimpl
    def ascend_after_evaluation(self, context: RunContext) -> None:
        if self._exchanged:
            self._exchange(context)

    def _exchange(self, context: RunContext) -> None:
        from .averaged_weights import exchange

        for bundle in context.models.values():
            exchange(bundle)
        self._exchanged = not self._exchanged


def _build(groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    from .optimizer import AveragingAdamW

    return AveragingAdamW(groups, **options)
