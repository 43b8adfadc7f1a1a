"""QLoRA: bytes of the quantised weights, and a step against PEFT with bitsandbytes."""

from __future__ import annotations

import tempfile
from typing import Any, Final

from .end_to_end import compared_steps
from .protocol import Benchmark, Settings, alternating, device, worker
from .rows import Row, bounded

BYTES: Final = "qlora, bytes of quantised linears, of those in bf16"
STEP: Final = "step, 17M Llama bf16 with qlora vs PEFT with bitsandbytes"
MOST: Final = 29.0
"""Percent: 25 for the codes, 0.78 for a scale of 8 bits per 64 weights, and the rest."""
GOAL: Final = 1.0
TOLERANCE: Final = 1e-3
"""Maximum relative difference of a step's losses in bf16."""


def benchmarks() -> list[Benchmark]:
    return [
        Benchmark(name=BYTES, goal=f"<= {MOST:g} %", measure=_bytes),
        Benchmark(name=STEP, goal=f">= {GOAL:g} x", measure=_step),
    ]


def _bytes(settings: Settings) -> Row:
    settings.report(BYTES)
    with tempfile.TemporaryDirectory() as folder:
        _run("write", folder, settings)
        found = _run("ascend-run", folder, settings)
    linears, model = found["linears"], found["model"]
    return bounded(
        name=BYTES,
        value=100 * linears["held"] / linears["in_bf16"],
        unit="%",
        limit=MOST,
        note=(
            f"storages of codes and scales, {linears['held'] / 1e6:.2f} MB; with embedding, output "
            f"layer and norms, which stay in bf16, {100 * model['held'] / model['in_bf16']:.1f} %"
        ),
        device=device(),
    )


def _step(settings: Settings) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        _run("write", folder, settings)
        ours, theirs = alternating(
            settings,
            lambda: _run("ascend-run", folder, settings),
            lambda: _run("peft", folder, settings),
            STEP,
        )
    return compared_steps(
        ours,
        theirs,
        name=STEP,
        goal=GOAL,
        loss_tolerance=TOLERANCE,
        notes=["adapters of rank 8 on every linear"],
        device=device(),
    )


def _run(what: str, folder: str, settings: Settings) -> dict[str, Any]:
    words = ["--steps", str(settings.steps), "--warmup", str(settings.warmup)]
    return worker("quantised_base_worker", what, folder, *words)
