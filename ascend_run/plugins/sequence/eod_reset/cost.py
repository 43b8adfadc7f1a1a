"""FLOPs saved by documents of a known length. No torch."""

from __future__ import annotations

from ascend_run.ops.attention.score_blocks import pairs_flops, pairs_seen
from ascend_run.plugin_api import Layout, PipelineStage, RunConfig


def saved_flops(config: RunConfig, layout: Layout, rank: PipelineStage, every: int) -> float:
    """Return the FLOPs per step and rank of the query-key pairs that cross documents."""
    length, window = config.data.seq_length, config.model.window_size
    whole, rest = divmod(length, every)
    left = whole * pairs_seen(every, window) + (pairs_seen(rest, window) if rest else 0.0)
    return pairs_flops(config, layout.cp, rank) * (pairs_seen(length, window) - left)
