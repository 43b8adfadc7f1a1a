"""Serving: what the server costs over the library call."""

from __future__ import annotations

import functools
import tempfile
from typing import Final

from .generation import MODEL
from .protocol import Benchmark, Settings, device, worker
from .rows import Row, compared

GOAL: Final = 1 / 1.05
WORKS: Final = {"one": "one stream", "batch": "16 requests at once"}


def benchmarks() -> list[Benchmark]:
    return [
        Benchmark(name=_name(work), goal=f">= {GOAL:.3g} x", measure=functools.partial(_row, work))
        for work in WORKS
    ]


def _name(work: str) -> str:
    return f"serve, {WORKS[work]}, {MODEL}: vs the library call"


def _row(work: str, settings: Settings) -> Row:
    words = ["--steps", str(settings.steps), "--warmup", str(settings.warmup)]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        worker("serving_worker", "write", "none", folder)
        for pair in range(1, settings.pairs + 1):
            settings.report(f"{_name(work)}: pair {pair} of {settings.pairs}")
            found.append(worker("serving_worker", "serve", work, folder, *words))
    return compared(
        name=_name(work),
        ours=[one["tokens"] / one["served_seconds"] for one in found],
        peer=[one["tokens"] / one["library_seconds"] for one in found],
        unit="tokens/s",
        goal=GOAL,
        note="streamed by HTTP, in turn with the call; the client works in the same process",
        device=device(),
    )
