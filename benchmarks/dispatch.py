"""Dispatch of tokens to the experts of two ranks, against Megatron's own dispatcher."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from typing import Final

from .protocol import Benchmark, Settings, device, worker
from .rows import Row, compared, failed

GOAL: Final = 1.2
PLUGINS: Final = {
    "moe-alltoall": "ours with moe-permute-fusion",
    "moe-allgather": "ours gathers tokens, so a token is sent once",
}
REPEATS: Final = 2
"""As ``expert_mlps``."""
TOLERANCE: Final = {"bf16": 2e-2, "fp32": 1e-5}


def benchmarks() -> list[Benchmark]:
    return [
        Benchmark(
            name=_name(plugin, dtype),
            goal=f">= {GOAL:g} x",
            measure=functools.partial(_measure, plugin, dtype),
        )
        for plugin, dtype in itertools.product(PLUGINS, TOLERANCE)
    ]


def _name(plugin: str, dtype: str) -> str:
    return f"dispatch to 64 experts on 2 ranks, {plugin} {dtype} vs megatron-core's all-to-all"


def _measure(plugin: str, dtype: str, settings: Settings) -> Row:
    """Both alternate on the same two ranks."""
    name = _name(plugin, dtype)
    settings.report(name)
    steps = REPEATS * settings.steps
    words = ["--plugin", plugin, "--dtype", dtype]
    words += ["--pairs", str(settings.pairs), "--steps", str(steps)]
    result = worker("dispatch_worker", *words)
    apart = [number for numbers in result["samples"].values() for number in numbers]
    difference = math.nan if any(map(math.isnan, apart)) else max(apart)
    medians = [
        1e3 * statistics.median(result["seconds"][first : first + steps])
        for first in range(0, len(result["seconds"]), steps)
    ]
    row = compared(
        name=name,
        ours=medians[::2],
        peer=medians[1::2],
        unit="ms",
        goal=GOAL,
        note=f"output and gradients within {difference:.1e}; 1024 tokens of a rank, 8 experts of "
        f"each; {PLUGINS[plugin]}",
        device=device(),
        larger_is_better=False,
    )
    if not difference <= TOLERANCE[dtype]:  # also true for NaN
        return failed(row, f"not the same: {difference:.1e} apart, {TOLERANCE[dtype]:g} allowed")
    return row
