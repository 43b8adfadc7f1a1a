"""What attention costs on the CPU beside what a fused kernel does. No torch."""

from __future__ import annotations

from ascend_run.ops.score_blocks import block_cost, needs_blocks
from ascend_run.plugin_api import (
    CostChange,
    KeptTensor,
    Layout,
    Moment,
    RankKind,
    RunConfig,
    WorkingMemory,
)


def platform_cost(config: RunConfig, layout: Layout, rank: RankKind) -> CostChange:
    """Host and device are one memory. Dropout, a soft cap and biases change what no fused kernel
    here follows in backward: then the scores are there, a block at a time."""
    if not needs_blocks(rank.attention_needs):
        return CostChange(host_is_device=True)
    part, cost = "self_attention", block_cost(config, layout.cp, rank)
    return CostChange(
        host_is_device=True,
        working=(
            WorkingMemory(
                part=f"{part}.core", name="scores", nbytes=cost.scores_bytes, moment=Moment.BACKWARD
            ),
        ),
        kept_added=(KeptTensor(part=part, name="attended", nbytes=cost.output_bytes),),
        flops=cost.flops,
    )
