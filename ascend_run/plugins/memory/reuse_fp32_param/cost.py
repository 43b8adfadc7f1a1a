"""What the plugin changes of a run's memory. No torch."""

from __future__ import annotations

from typing import Final

from ascend_run.ops.data_parallel_shares import data_parallel_shares
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
    at_once = largest = 0.0
    for parameters, shards in data_parallel_shares(config, layout, rank):
        numels = [p.numel for p in parameters]
        held = sum(numels) / shards
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
