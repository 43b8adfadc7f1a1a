"""Serving: what the server costs over the library call."""

from __future__ import annotations

import functools
import tempfile
from typing import Final

from .generation import MODEL
from .protocol import Benchmark, Settings, alternating, device, worker
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
    with tempfile.TemporaryDirectory() as folder:
        worker("serving_worker", "write", "none", folder)
        served, library = alternating(
            settings,
            lambda: worker("serving_worker", "served", work, folder, *words),
            lambda: worker("serving_worker", "library", work, folder, *words),
            _name(work),
        )
    return compared(
        name=_name(work),
        ours=[one["tokens"] / one["seconds"] for one in served],
        peer=[one["tokens"] / one["seconds"] for one in library],
        unit="tokens/s",
        goal=GOAL,
        note="streamed by HTTP; the client works in the process of the server",
        device=device(),
    )
