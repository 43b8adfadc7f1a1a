"""What the plugin changes of a run's memory. No torch."""

from __future__ import annotations

from typing import Final

from ascend_run.plugin_api import (
    CostChange,
    Layout,
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
_BLOCK: Final = {True: 1 << 18, False: 1 << 20}
"""Elements of a parameter that are converted at once, each with an int32, by whether that is on a
CPU."""


def memory_cost(
    config: RunConfig, layout: Layout, rank: PipelineStage, bucket_size: int
) -> CostChange:
    """Return the master weights between steps, and what a step adds to them."""
    spread = config.ddp.use_distributed_optimizer
    trained = [p for p in rank.parameters if p.trained]
    at_once = largest = 0.0
    for is_expert, ranks in ((False, layout.dp * layout.cp), (True, layout.expt_dp)):
        numels = [p.numel for p in trained if p.is_expert is is_expert]
        held = sum(numels) / (ranks if spread else 1)
        most = max(numels, default=0)
        at_once = max(at_once, min(held, max(bucket_size, most)))
        largest = max(largest, min(held, most))
    block = min(largest, _BLOCK[config.platform == "cpu"])
    return CostChange(
        main_param_bytes=RESIDUAL + ASIDE,
        working=(
            WorkingMemory(
                part="optimizer",
                name="main_param",
                nbytes=_WIDE * (at_once + block),
                phase=Phase.UPDATE,
            ),
        ),
    )
