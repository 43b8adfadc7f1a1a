"""Communication of linears with their adapters. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ascend_run.ops.linear.linear_communication import buffers, in_slices
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
    changes = [*sliced.changes(keep_gathered=False), *_of_adapters()]
    return CostChange(
        communication=tuple(Communication(**change) for change in changes),
        buffers=buffers(config),
    )


def _of_adapters() -> Iterator[dict[str, Any]]:
    """Of a row-parallel output, one gather of the gradient serves linear and adapter."""
    for operation, direction, calls in (
        ("all_gather", "forward", 1),
        ("all_gather", "backward", 0),
        ("reduce_scatter", "forward", 1),
        ("reduce_scatter", "backward", 1),
        ("all_reduce", "forward", 1),
        ("all_reduce", "backward", 1),
    ):
        yield {
            "operation": operation,
            "group": "tp",
            "calls": calls,
            "sent_bytes": calls,
            "overlapped": True,
            "why": f"*, {direction}: adapters",
            "replaces": operation,
        }
