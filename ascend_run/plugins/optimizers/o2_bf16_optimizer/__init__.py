"""AdamW with both moments in bfloat16, the second one rounded stochastically."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs

from ascend_run.plugin_api import (
    CostChange,
    Layout,
    LegacyFlag,
    Manifest,
    Maturity,
    Numerics,
    OptimizerSpec,
    OptimizerState,
    PipelineStage,
    RunConfig,
    Support,
    hookimpl,
)
from ascend_run.plugins.optimizers import adamw_options, cost_of_chunks

if TYPE_CHECKING:
    import torch

CHUNK: Final = 2**20
"""Elements that are updated at once, which bounds the float32 copies of the moments."""


@attrs.frozen(kw_only=True)
class O2Bf16OptimizerConfig:
    """Options, set by ``plugins.o2-bf16-optimizer.<field>=<value>``."""

    stochastic_rounding: bool = True
    """Round the second moment up or down at random, so that it is right on average; otherwise to
    the nearest value, in which small changes are lost."""


class O2Bf16Optimizer:
    """Keep AdamW's moments in bfloat16; update in float32.

    Cost: 4 bytes per parameter less than AdamW; some 10 more passes over the second moment in each
    step. Numerics: moments are rounded to 8 bits. Source: MindSpeed LLM's ``--o2-optimizer``;
    stochastic rounding: Gupta et al. 2015, arXiv:1502.02551.
    """

    manifest = Manifest(
        name="o2-bf16-optimizer",
        summary="AdamW with moments in bfloat16, the second one rounded stochastically",
        numerics=Numerics.MODEL,
        # Rounding errors of gradients draw other numbers, and move moments to a neighbour.
        small_model_settings={"stochastic_rounding": False, "optimizer.lr": 1e-4},
        platforms={"cpu": Support.REAL, "cuda": Support.REAL, "npu": Support.UNVERIFIED},
        level=3,
        maturity=Maturity.BETA,
        legacy_flags=(LegacyFlag(flag="--o2-optimizer"),),
        source="MindSpeed LLM, docs/features/o2.md",
    )
    config_class = O2Bf16OptimizerConfig

    def __init__(self, config: O2Bf16OptimizerConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_optimizer(self, config: RunConfig) -> OptimizerSpec:
        return OptimizerSpec(
            build=partial(
                _build,
                **adamw_options(config),
                seed=config.run.seed if self.config.stochastic_rounding else None,
            ),
            states={
                "step": OptimizerState(scalar=True),
                "exp_avg": OptimizerState(dtype="bfloat16"),
                "exp_avg_sq": OptimizerState(dtype="bfloat16"),
            },
            element_wise=True,
        )

    @hookimpl
    def ascend_cost(self, config: RunConfig, layout: Layout, rank: PipelineStage) -> CostChange:
        # Beside both copies there are the numbers that are drawn, as int32, and these shifted.
        most = 16 if self.config.stochastic_rounding else 8
        return cost_of_chunks(config, layout, rank, CHUNK, to_begin=8, most=most)


def _build(groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    from .optimizer import Bf16AdamW

    return Bf16AdamW(groups, **options)
