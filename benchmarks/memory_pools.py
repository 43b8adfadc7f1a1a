"""What separate pools save: the recorded allocations of a real run, replayed by the simulator."""

from __future__ import annotations

from typing import Final

from .protocol import Benchmark, Settings, device, worker
from .rows import Row, compared

GOAL: Final = 1.0
"""Two pools reserve no more than one."""
NAME: Final = "memory-fragmentation, 36M Llama bf16, reserved vs one pool"


def benchmarks() -> list[Benchmark]:
    return [Benchmark(name=NAME, goal=f">= {GOAL:g} x", measure=_measure)]


def _measure(settings: Settings) -> Row:
    settings.report(NAME)
    found = worker("memory_pools_worker")
    one, two = found["one_pool"], found["two_pools"]
    unused = " and ".join(f"{1 - found['allocated'] / each:.1%}" for each in (two, one))
    return compared(
        name=NAME,
        ours=[two / 2**20],
        peer=[one / 2**20],
        unit="MiB",
        goal=GOAL,
        note=f"simulated allocator; {found['allocations']} allocations and frees recorded in two "
        f"steps on the CPU; {found['allocated'] / 2**20:.0f} MiB allocated, unused {unused}",
        device=device(),
        larger_is_better=False,
    )
