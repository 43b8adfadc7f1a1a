"""Code that runs on the rank of ``memory_pools_worker``; can be imported without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ascend_run.ops.memory.allocation_trace import Allocation, Usage

NAME: Final = "memory-fragmentation"


def record(values: Mapping[str, Any], steps: int) -> list[Allocation]:
    """Build a model and train; return what the plugin recorded of it, to the end of the last step.

    Called on the only rank of a default process group.
    """
    from unittest import mock

    from ascend_run.plugins.memory.memory_fragmentation.trace import AllocationTrace
    from ascend_run.testing.dry_run import DryRun
    from ascend_run.testing.models import samples

    from .memory_run import run_of_rank

    found: list[Allocation] = []
    end = AllocationTrace.end

    def ended(trace: AllocationTrace) -> tuple[Usage, Usage]:
        found.extend(trace.allocations)
        return end(trace)

    given = {**values, f"plugins.{NAME}.traced_steps": steps}
    with (
        mock.patch.object(AllocationTrace, "end", ended),
        run_of_rank(given, [NAME]) as (hooks, context),
    ):
        dry_run = DryRun(hooks, context)
        dry_run.build()
        step = dry_run.train_step()
        batches = dry_run.batches(samples(values, steps * context.config.train.global_batch_size))
        for _ in range(steps):
            dry_run.step(step, batches)
    return found
