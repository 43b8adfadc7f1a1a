"""Ulysses on two ranks of one thread each, against the exchange done plainly."""

from __future__ import annotations

from typing import Final

from .protocol import Benchmark, Settings, alternating, worker
from .ring_attention import row_of
from .rows import Row

GOAL: Final = 1.1
REPEATS: Final = 5
"""Steps are short, so a process times so many for each that the settings ask for."""


LENGTH, BATCH, GROUPS = 512, 4, 1
"""Short sequences, where the exchange is more than a few parts in a hundred of the attention."""
NAME: Final = f"ulysses, 2 ranks, S {LENGTH} x {BATCH}, 8 heads on {GROUPS} fp32 vs plain exchange"
NOTE: Final = (
    "plain: one all-to-all for each of q, k, v and the output, the key-value head repeated to all "
    "query heads; the same kernel"
)


def benchmarks() -> list[Benchmark]:
    return [Benchmark(name=NAME, goal=f">= {GOAL:g} x", measure=_measure)]


def _measure(settings: Settings) -> Row:
    words = ["--length", str(LENGTH), "--batch", str(BATCH), "--groups", str(GROUPS)]
    words += ["--steps", str(REPEATS * settings.steps), "--warmup", str(settings.warmup)]
    ours, theirs = alternating(
        settings,
        lambda: worker("ulysses_worker", "--system", "ascend-run", *words),
        lambda: worker("ulysses_worker", "--system", "plain", *words),
        NAME,
    )
    return row_of(NAME, ours, theirs, GOAL, NOTE)
