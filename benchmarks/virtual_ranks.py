"""What cutting, merging and summing cost a ring: its ranks one after the other on one GPU, against
one call of torch's attention.

What of it a CPU can run is tested there.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from .gpu_step import STEPS_FACTOR, device, require_gpu
from .protocol import Benchmark, Settings, alternating, worker
from .rows import Row, compared, failed

NAME: Final = "attention, 8 virtual ranks of a ring on a GPU, S 16384 bf16 vs one SDPA call"
GOAL: Final = 0.909
"""At most 10 % over the one call; the aim is 5 %."""
TOLERANCE: Final = 2e-2
"""bf16 has eight bits, and each rank's output is rounded to it."""


def benchmarks() -> list[Benchmark]:
    return [Benchmark(name=NAME, goal=f">= {GOAL:g} x", measure=_measure, device=device)]


def _measure(settings: Settings) -> Row:
    require_gpu()
    steps, warmup = settings.steps * STEPS_FACTOR, settings.warmup * STEPS_FACTOR
    words = ("--steps", str(steps), "--warmup", str(warmup))
    ours, theirs = alternating(
        settings,
        lambda: worker("virtual_ranks_worker", "--form", "ranks", *words),
        lambda: worker("virtual_ranks_worker", "--form", "one", *words),
        NAME,
    )
    apart = max(result["apart"] for result in ours)
    row = compared(
        name=NAME,
        ours=_milliseconds(ours),
        peer=_milliseconds(theirs),
        unit="ms",
        goal=GOAL,
        note=f"causal, forward and backward of 16 heads of width 128; within {apart:.1e}; aim "
        "0.952 x",
        device=ours[0]["device"],
        larger_is_better=False,
    )
    if not apart <= TOLERANCE:  # so written, a nan fails too
        return failed(row, f"not the attention of one call: {apart:.1e} apart")
    return row


def _milliseconds(results: Sequence[Mapping[str, Any]]) -> list[float]:
    return [1e3 * statistics.median(result["seconds"]) for result in results]
