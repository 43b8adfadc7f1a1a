"""Attention over several documents in one sequence, compared per pair with a single document."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from .protocol import Benchmark, Settings, alternating, device, worker
from .rows import Row, compared, failed

DOCUMENTS: Final = (2311, 187, 1502, 640, 1999, 77, 901, 575)
"""Lengths, in parts of ``LENGTH`` tokens."""
LENGTH: Final = sum(DOCUMENTS)
NAME: Final = f"attention over documents, S {LENGTH} fp32, by the pair vs dense causal"
GOAL: Final = 0.909
"""At most 10 % slower."""
TOLERANCE: Final = 1e-5


def benchmarks() -> list[Benchmark]:
    return [Benchmark(name=NAME, goal=f">= {GOAL:g} x", measure=_measure)]


def _measure(settings: Settings) -> Row:
    words = ["--steps", str(settings.steps), "--warmup", str(settings.warmup)]
    ours, theirs = alternating(
        settings,
        lambda: worker("packed_worker", "--packed", *words),
        lambda: worker("packed_worker", *words),
        NAME,
    )
    pairs = ours[0]["pairs"], theirs[0]["pairs"]
    apart = max(result["apart"] for result in ours)
    row = compared(
        name=NAME,
        ours=_picoseconds(ours),
        peer=_picoseconds(theirs),
        unit="ps",
        goal=GOAL,
        note=f"{len(DOCUMENTS)} documents of {min(DOCUMENTS)} to {max(DOCUMENTS)} tokens, "
        f"{pairs[0]:,} pairs beside {pairs[1]:,}, forward and backward of 8 heads of width 64; "
        "the kernel computes squares of 64 across the diagonal whole, 1.04 x the documents' pairs; "
        f"a document alone is within {apart:.1e}",
        device=device(),
        larger_is_better=False,
    )
    if not apart <= TOLERANCE:  # also true for NaN
        return failed(row, f"not a document's own attention: {apart:.1e} apart")
    return row


def ends_of(length: int) -> tuple[int, ...]:
    """Return the document ends in a sequence of the given length."""
    ends, place = [], 0
    for part in DOCUMENTS:
        place += part
        ends.append(place * length // LENGTH)
    return tuple(ends)


def pairs_of(ends: tuple[int, ...]) -> int:
    """Return the number of (query, key) pairs that attend."""
    return sum((end - start) * (end - start + 1) // 2 for start, end in pairwise((0, *ends)))


def _picoseconds(results: Sequence[Mapping[str, Any]]) -> list[float]:
    return [1e12 * statistics.median(a["seconds"]) / a["pairs"] for a in results]
