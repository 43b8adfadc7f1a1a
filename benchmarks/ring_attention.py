"""Ring attention on two ranks with one thread each, compared with no communication and a peer."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

from .protocol import Benchmark, Settings, alternating, device, worker
from .rows import Row, compared, failed

LONG, SHORT = 8192, 2048
TOLERANCE: Final = 1e-5
"""Maximum difference of a sample, relative to the largest sample of its tensor."""


@attrs.frozen(kw_only=True)
class Other:
    """What ours is compared with, and the goal."""

    system: str
    label: str
    goal: float
    note: str
    length: int = LONG
    in_peers: bool = False
    """Whether it is installed in the peers' environment."""


IDEAL: Final = "ideal: the same work without communication, half of the heads on each rank"
OTHERS: Final = (
    Other(
        system="ideal",
        label="ideal",
        goal=0.85,
        note=IDEAL,
    ),
    Other(
        system="ring-flash-attn",
        label="ring-flash-attn zigzag",
        goal=1.0,
        note="both by the same CPU kernel of torch",
        in_peers=True,
    ),
    Other(
        system="ideal",
        label="ideal",
        goal=0.75,
        note=IDEAL,
        length=SHORT,
    ),
)


def benchmarks() -> list[Benchmark]:
    return [
        Benchmark(
            name=_name(other),
            goal=f">= {other.goal:g} x",
            measure=functools.partial(_measure, other),
        )
        for other in OTHERS
    ]


def _name(other: Other) -> str:
    return f"ring attention, 2 ranks, S {other.length} fp32 vs {other.label}"


def _measure(other: Other, settings: Settings) -> Row:
    words = ["--length", str(other.length), "--steps", str(settings.steps)]
    words += ["--warmup", str(settings.warmup)]
    python = settings.peers_python if other.in_peers else None
    ours, theirs = alternating(
        settings,
        lambda: worker("ring_worker", "--system", "ascend-run", *words),
        lambda: worker("ring_worker", "--system", other.system, *words, python=python),
        _name(other),
    )
    return row_of(_name(other), ours, theirs, other.goal, other.note)


def row_of(
    name: str,
    ours: Sequence[Mapping[str, Any]],
    theirs: Sequence[Mapping[str, Any]],
    goal: float,
    note: str,
) -> Row:
    """Return a row that fails unless both computed the same attention."""
    difference = largest_difference(ours[0]["samples"], theirs[0]["samples"])
    row = compared(
        name=name,
        ours=_milliseconds(ours),
        peer=_milliseconds(theirs),
        unit="ms",
        goal=goal,
        note=f"output and gradients within {difference:.1e}; {note}",
        device=device(),
        larger_is_better=False,
    )
    if not difference <= TOLERANCE:  # also true for NaN
        return failed(row, f"not the same attention: {difference:.1e} apart, {TOLERANCE:g} allowed")
    return row


def _milliseconds(results: Sequence[Mapping[str, Any]]) -> list[float]:
    return [1e3 * statistics.median(result["seconds"]) for result in results]


def largest_difference(
    ours: Mapping[str, Sequence[float]], theirs: Mapping[str, Sequence[float]]
) -> float:
    """Return the largest difference of samples ``tensor/position/head``; NaN if one is NaN, or if
    the keys differ."""
    if ours.keys() != theirs.keys() or not ours:
        return math.nan
    apart: dict[str, float] = {}
    largest: dict[str, float] = {}
    for place, numbers in ours.items():
        tensor = place.partition("/")[0]
        for a, b in zip(numbers, theirs[place], strict=True):
            if not math.isfinite(a - b):
                return math.nan
            apart[tensor] = max(apart.get(tensor, 0.0), abs(a - b))
            largest[tensor] = max(largest.get(tensor, 0.0), abs(b))
    return max(apart[tensor] / largest[tensor] for tensor in apart)
