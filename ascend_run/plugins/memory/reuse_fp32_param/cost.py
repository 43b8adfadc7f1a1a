"""What the plugin changes of a run's memory. No torch."""

from __future__ import annotations

from typing import Final

from ascend_run.plugin_api import (
    CostChange,
    Layout,
    ParameterCost,
    Phase,
    PipelineStage,
    RunConfig,
    WorkingMemory,
)

RESIDUAL: Final = 2.0
"""Bytes of the 16 bits."""
ASIDE: Final = 12 * 2.0**-17
"""Bytes per element of the values that are kept aside: 12 of one in 2**17; see
``ops.bf16_residual``."""
_WIDE: Final = 4
_BLOCK: Final = 1 << 20
"""A CPU has a smaller one."""
_PER_ELEMENT_OF_BLOCK: Final = 5
"""An int32, and where there is a NaN whether it is one."""


def memory_cost(
    config: RunConfig, layout: Layout, rank: PipelineStage, bucket_size: int
) -> CostChange:
    """Return the master weights between steps, and what a step adds to them."""
    spread = config.ddp.use_distributed_optimizer
    trained = [p for p in rank.parameters if p.trained]
    most = 0.0
    for is_expert, ranks in ((False, layout.dp * layout.cp), (True, layout.expt_dp)):
        own = [p for p in trained if p.is_expert is is_expert]
        most = max(most, _bucket(own, ranks if spread else 1, bucket_size))
    return CostChange(
        main_param_bytes=RESIDUAL + ASIDE,
        working=(
            WorkingMemory(
                part="optimizer",
                name="main_param",
                nbytes=_WIDE * most + _PER_ELEMENT_OF_BLOCK * min(most, _BLOCK),
                phase=Phase.UPDATE,
            ),
        ),
    )


def _bucket(parameters: list[ParameterCost], ranks: int, bucket_size: int) -> float:
    """Return the elements of the largest bucket of a rank."""
    numels = [p.numel for p in parameters]
    if not numels:
        return 0.0
    return min(sum(numels) / ranks, max(bucket_size, *numels))
