"""Bytes that an optimizer holds between steps: all storages of runs with a plugin and without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from .protocol import Benchmark, Settings, device, worker
from .rows import Row, bounded

REUSED: Final = "reuse-fp32-param, saved bytes per parameter x data-parallel ranks, off 2"
EIGHT_BITS: Final = "low-precision-optimizer, bytes of its moments, of AdamW's"
SAVED: Final = 2.0
"""Bytes: half of a float32 master weight."""
MOST_OFF: Final = 0.001
"""Bytes: 12 per 2^17 parameters are kept aside, and 4 per tensor."""
QUARTER: Final = 25.6
"""Percent: 25 for the codes, 0.39 for a float32 scale per 256 elements of each moment, 0.1 for the
tables of any model, 0.25 MiB, and for the norms' moments, which stay in float32."""
RANKS: Final = (1, 2)


def benchmarks() -> list[Benchmark]:
    return [
        Benchmark(name=REUSED, goal=f"<= {MOST_OFF:g} bytes", measure=_reused),
        Benchmark(name=EIGHT_BITS, goal=f"<= {QUARTER:g} %", measure=_eight_bits),
    ]


def _reused(settings: Settings) -> Row:
    """On one rank, and on each of two with the distributed optimizer."""
    settings.report(REUSED)
    saved = {}
    for ranks in RANKS:
        without, with_it = (_held(ranks, enable) for enable in ((), ("reuse-fp32-param",)))
        pairs = zip(without["ranks"], with_it["ranks"], strict=True)
        total = sum(one["trained"] - other["trained"] for one, other in pairs)
        saved[ranks] = total / ranks / without["parameters"]
    shown = ", ".join(f"{value:.5f} on {ranks}" for ranks, value in saved.items())
    return bounded(
        name=REUSED,
        value=max(abs(value * ranks - SAVED) for ranks, value in saved.items()),
        unit="bytes",
        limit=MOST_OFF,
        note=f"bytes saved per parameter and rank: {shown}; 36M Llama bf16, distributed optimizer",
        device=device(),
    )


def _eight_bits(settings: Settings) -> Row:
    settings.report(EIGHT_BITS)
    adamw, ours = (_held(1, enable) for enable in ((), ("low-precision-optimizer",)))
    moments = [one["ranks"][0]["trained"] - one["ranks"][0]["built"] for one in (ours, adamw)]
    each = " and ".join(f"{nbytes / adamw['parameters']:.4f}" for nbytes in moments)
    return bounded(
        name=EIGHT_BITS,
        value=100 * moments[0] / moments[1],
        unit="%",
        limit=QUARTER,
        note=f"{each} bytes per parameter; 36M Llama bf16",
        device=device(),
    )


def _held(ranks: int, enable: Sequence[str]) -> dict[str, Any]:
    words = ["--ranks", str(ranks), "--enable", *enable]
    return worker("optimizer_states_worker", *words)
