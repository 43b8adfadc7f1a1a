"""A training step of adapters on two tensor-parallel ranks of one thread each: cc-lora, and
fused-mlp, against lora alone."""

from __future__ import annotations

import functools
from typing import Final

from .end_to_end import compared_steps
from .protocol import Benchmark, Settings, alternating, device, worker
from .rows import Row

GOAL: Final = 1.0
TOLERANCE: Final = 1e-5
"""Largest relative difference of the losses, in float32."""
LAYOUTS: Final = ("sequence", "tensors")
"""With sequence parallelism, and without."""
FEATURES: Final = ("cc-lora", "fused-mlp")


def benchmarks() -> list[Benchmark]:
    return [
        Benchmark(
            name=name_of(feature, layout),
            goal=f">= {GOAL:g} x",
            measure=functools.partial(_measure, feature, layout),
        )
        for feature in FEATURES
        for layout in LAYOUTS
    ]


def name_of(feature: str, layout: str) -> str:
    parallel = {"sequence": "tp 2, sequence parallel", "tensors": "tp 2"}[layout]
    return f"step, Llama fp32 with adapters, {parallel}: {feature} vs lora"


def _measure(feature: str, layout: str, settings: Settings) -> Row:
    name = name_of(feature, layout)
    words = ["--layout", layout, "--steps", str(settings.steps), "--warmup", str(settings.warmup)]
    ours, alone = alternating(
        settings,
        lambda: worker("adapter_steps_worker", "--system", feature, *words),
        lambda: worker("adapter_steps_worker", "--system", "lora", *words),
        name,
    )
    return compared_steps(
        ours, alone, name=name, goal=GOAL, loss_tolerance=TOLERANCE, device=device()
    )
