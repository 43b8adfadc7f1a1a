"""What separate pools save: the recorded allocations of a real run, replayed by the simulator."""

from __future__ import annotations

import functools
from typing import Final

from .protocol import Benchmark, Settings, device, worker
from .rows import Row, compared

GOAL: Final = 1.0
"""Two pools reserve no more than one."""
SIZES: Final = {1: "", 16: ", every tensor 16 times as large"}


def benchmarks() -> list[Benchmark]:
    return [
        Benchmark(
            name=_name(factor), goal=f">= {GOAL:g} x", measure=functools.partial(_measure, factor)
        )
        for factor in SIZES
    ]


def _name(factor: int) -> str:
    return f"memory-fragmentation, 36M Llama bf16{SIZES[factor]}, reserved vs one pool"


def _measure(factor: int, settings: Settings) -> Row:
    settings.report(_name(factor))
    found = worker("memory_pools_worker", "--factor", str(factor))
    one, two = found["one_pool"], found["two_pools"]
    unused = " and ".join(f"{1 - found['allocated'] / each:.1%}" for each in (two, one))
    return compared(
        name=_name(factor),
        ours=[two / 2**20],
        peer=[one / 2**20],
        unit="MiB",
        goal=GOAL,
        note=f"simulated allocator; {found['allocations']} allocations and frees recorded in two "
        f"steps on the CPU; {found['allocated'] / 2**20:.0f} MiB allocated, unused {unused}",
        device=device(),
        larger_is_better=False,
    )
