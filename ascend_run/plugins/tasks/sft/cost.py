"""Cost of a dense attention mask. No torch."""

from __future__ import annotations

from ascend_run.ops.attention.score_blocks import pairs_flops, pairs_seen
from ascend_run.plugin_api import CostChange, Layout, PipelineStage, RunConfig


def dense_mask_cost(
    config: RunConfig, layout: Layout, rank: PipelineStage, *, packing: bool
) -> CostChange:
    """Return the cost of the pairs that a causal mask would skip, and of the mask buffers.

    The mask is held as booleans and as a bias for full sequences, and packed rows form one
    sequence. This counts one micro-batch: pipeline stages hold more.
    """
    length, rows = config.data.seq_length, config.train.micro_batch_size
    pairs = (rows if packing else 1) * rows * length**2
    hidden = length**2 - pairs_seen(length, None)
    return CostChange(
        flops=pairs_flops(config, layout.cp, rank) * hidden,
        buffers={"attention mask": pairs * (1 + rank.item_bytes)},
    )
