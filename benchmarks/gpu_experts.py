"""The feed-forward of experts on one GPU: against a loop over experts, and against its grouped
GEMMs alone.
"""

from __future__ import annotations

import functools
from typing import Final

from .gpu_experts_worker import FORMS, ROUTINGS
from .gpu_step import device, require_gpu
from .protocol import Benchmark, Settings, alternating, worker
from .rows import Row, compared, failed

EXPERTS: Final = (8, 64, 128)
LABELS: Final = {"loop": "a loop over experts", "products": "its grouped GEMMs alone"}
LOOP_GOAL: Final = 1.4
MANY_GOAL: Final = 2.6
"""Against the loop, of 64 or more experts."""
PRODUCTS_GOAL: Final = 0.95
TOLERANCE: Final = 1e-2
"""bf16 has eight bits; the loop rounds in other places."""


def benchmarks() -> list[Benchmark]:
    """One row per number of experts, routing and peer."""
    return [
        Benchmark(
            name=_name(form, experts, routing),
            goal=f">= {_goal(form, experts):g} x",
            measure=functools.partial(_measure, form, experts, routing),
            device=device,
        )
        for experts in EXPERTS
        for routing in ROUTINGS
        for form in FORMS[1:]
    ]


def _name(form: str, experts: int, routing: str) -> str:
    return f"experts on a GPU, {experts}, {routing}, bf16 vs {LABELS[form]}"


def _goal(form: str, experts: int) -> float:
    if form == "products":
        return PRODUCTS_GOAL
    return LOOP_GOAL if experts < 64 else MANY_GOAL


def _measure(form: str, experts: int, routing: str, settings: Settings) -> Row:
    require_gpu()
    words = ("--experts", str(experts), "--routing", routing, "--steps", str(5 * settings.steps))
    run = functools.partial(worker, "gpu_experts_worker", *words, "--form")
    name = _name(form, experts, routing)
    ours, theirs = alternating(settings, lambda: run("ours"), lambda: run(form), name)
    apart = max(result["apart"] for result in ours)
    row = compared(
        name=name,
        ours=[1e3 * result["seconds"] for result in ours],
        peer=[1e3 * result["seconds"] for result in theirs],
        unit="ms",
        goal=_goal(form, experts),
        note=f"forward and backward of 32768 rows, H 4096, F 1536; within {apart:.1e} of the loop",
        device=ours[0]["device"],
        larger_is_better=False,
    )
    if not apart <= TOLERANCE:  # so written, a nan fails too
        return failed(row, f"not what the loop computes: {apart:.1e} apart")
    return row
