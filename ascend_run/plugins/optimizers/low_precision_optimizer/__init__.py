"""AdamW with both moments of matrices in 8 bits, quantized block by block."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

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
from ascend_run.plugins.optimizers import adamw_options, cost_of_chunks, warn_of_unknown_names

from .parameters import (
    BLOCK,
    CHUNK,
    DEVICE_CHUNK,
    EIGHT_BITS,
    MOMENTS,
    TABLE_BYTES,
    WIDE,
    parameter_options,
)

if TYPE_CHECKING:
    import torch

    from ascend_run.plugin_api import RunContext


@attrs.frozen(kw_only=True)
class LowPrecisionOptimizerConfig:
    """Options, set by ``plugins.low-precision-optimizer.<field>=<value>``."""

    float32: tuple[str, ...] = ()
    """Names of further parameters whose moments stay in float32, or of modules that hold them, such
    as ``embedding`` or ``router``; those of norms and biases always do."""


class LowPrecisionOptimizer:
    """Keep AdamW's moments as 8-bit codes and one scale per block; update in float32.

    Cost: 6 bytes per parameter less than AdamW; quantization in each step. Numerics: moments are
    rounded to 256 values in each block. Source: Dettmers et al. 2022, arXiv:2110.02861.
    """

    manifest = Manifest(
        name="low-precision-optimizer",
        summary="AdamW with moments in 8 bits, quantized block by block",
        numerics=Numerics.MODEL,
        # Codes depend on where blocks begin, and so on the layout.
        small_model_settings={"optimizer.lr": 5e-6},
        platforms={"cpu": Support.REAL, "cuda": Support.REAL, "npu": Support.UNVERIFIED},
        level=3,
        maturity=Maturity.BETA,
        legacy_flags=(
            LegacyFlag(flag="--quant-states", values={"fp8": True, "hif8": True, "mxfp8": True}),
        ),
        source="MindSpeed, docs/features/low-precision-optimizer.md; arXiv:2110.02861",
    )
    config_class = LowPrecisionOptimizerConfig

    def __init__(self, config: LowPrecisionOptimizerConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_optimizer(self, config: RunConfig) -> OptimizerSpec:
        codes = OptimizerState(dtype="uint8", where={MOMENTS: EIGHT_BITS})
        scales = OptimizerState(block=BLOCK, where={MOMENTS: EIGHT_BITS})
        wide = OptimizerState(where={MOMENTS: WIDE})
        return OptimizerSpec(
            build=partial(
                _build,
                **adamw_options(config),
            ),
            states={
                "step": OptimizerState(scalar=True),
                **{f"{name}_codes": codes for name in ("exp_avg", "exp_avg_sq")},
                **{f"{name}_scales": scales for name in ("exp_avg", "exp_avg_sq")},
                **dict.fromkeys(("exp_avg", "exp_avg_sq"), wide),
            },
            element_wise=True,
            parameter_options=partial(parameter_options, wide=self.config.float32),
        )

    @hookimpl
    def ascend_cost(self, config: RunConfig, layout: Layout, rank: PipelineStage) -> CostChange:
        chunk = CHUNK if config.platform == "cpu" else DEVICE_CHUNK
        # Codes are looked up as int64. To quantize takes three tensors in 32 bits, and the codes.
        cost = cost_of_chunks(config, layout, rank, chunk, to_begin=16, most=21)
        return attrs.evolve(cost, buffers={"tables of 8-bit codes": TABLE_BYTES})

    @hookimpl
    def ascend_before_run(self, context: RunContext) -> None:
        option = "plugins.low-precision-optimizer.float32"
        warn_of_unknown_names(option, self.config.float32, context)


def _build(groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    from .optimizer import EightBitAdamW

    return EightBitAdamW(groups, **options)
