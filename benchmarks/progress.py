"""Cost of the progress display in a step: an update that draws nothing."""

from __future__ import annotations

import statistics
from typing import Final

from .protocol import Benchmark, Settings, device, worker
from .rows import Row, bounded

ROW: Final = "progress, an update between two drawings"
LIMIT_NS: Final = 1000.0


def benchmarks() -> list[Benchmark]:
    """One row."""
    return [Benchmark(name=ROW, goal=f"<= {LIMIT_NS:g} ns", measure=_measure)]


def _measure(settings: Settings) -> Row:
    settings.report(ROW)
    found = worker("progress_worker", "--repeats", str(settings.repeats))["nanoseconds"]
    return bounded(
        name=ROW,
        value=statistics.median(found),
        unit="ns",
        limit=LIMIT_NS,
        note=f"median of {len(found)}, {min(found):.0f} to {max(found):.0f} ns; with the loop",
        device=device(),
    )
