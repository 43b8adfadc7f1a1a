"""Cost of the fingerprint of every step: its share of a step of the demo's model."""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Final

from .listeners import demo_step
from .protocol import ROOT, Benchmark, Settings, device, worker
from .rows import Row, bounded, failed
from .tiny_data import make_tiny_data

NAME: Final = "fingerprint of every step, share of a demo step"
LIMIT_PERCENT: Final = 0.5


def benchmarks() -> list[Benchmark]:
    return [Benchmark(name=NAME, goal=f"<= {LIMIT_PERCENT:g} %", measure=_measure)]


def _measure(settings: Settings) -> Row:
    """Time in the code of the fingerprint relative to the time of the steps, in one real run."""
    settings.report(NAME)
    steps = 3 * settings.steps
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prefix = make_tiny_data(folder, [sys.executable, "-m", "ascend_run"])
        found = worker("fingerprint_worker", "--config", ROOT / "examples" / "demo.toml",
            *demo_step(folder, prefix, steps),
        )  # fmt: skip
    spent, seconds = statistics.median(found["spent_seconds"]), found["step_seconds"]
    row = bounded(
        name=NAME,
        value=100 * spent / seconds,
        unit="%",
        limit=LIMIT_PERCENT,
        note=f"{1e3 * spent:.2f} ms of {1e3 * seconds:.0f} ms: {found['elements']} elements of "
        f"{found['tensors']} tensors copied, hashed, summed over the ranks and written",
        device=device(),
    )
    if found["entries"] != steps + 1:
        return failed(row, f"expected {steps + 1} entries in the file, found {found['entries']}")
    return row
