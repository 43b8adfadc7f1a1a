"""Communication of linears with their adapters. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_run.ops.linear.linear_communication import buffers, in_slices, of_adapters
from ascend_run.plugin_api import Communication, CostChange

if TYPE_CHECKING:
    from ascend_run.plugin_api import Layout, PipelineStage, RunConfig

    from . import CcLoraOptions


def cost_change(
    config: RunConfig, layout: Layout, rank: PipelineStage, options: CcLoraOptions
) -> CostChange:
    """Return the collectives of linears in slices, one of them exposed, and those of adapters, all
    overlapped."""
    split = config.parallel.sequence_parallel
    sliced = in_slices(options.slices, rank.tokens // layout.tp if split else rank.tokens)
    changes = [*sliced.changes(keep_gathered=False), *of_adapters("*")]
    return CostChange(
        communication=tuple(Communication(**change) for change in changes),
        buffers=buffers(config),
    )
