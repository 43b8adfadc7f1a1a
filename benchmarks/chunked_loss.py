"""The loss of a large vocabulary, forward and backward: chunks of logits against all of them."""

from __future__ import annotations

from typing import Any, Final

from .protocol import Benchmark, Settings, device, worker
from .ring_worker import MEMORY
from .rows import Row, bounded, compared, failed

TOLERANCE: Final = 2e-2
"""As ``expert_mlps``."""
PREFIX: Final = "cross-entropy, 65536 words, 8192 tokens, bf16"
MOST_BYTES: Final = 15.0
"""Percent of the bytes that all logits take."""


GOAL: Final = 1.3
_TIMES: Final = f"{PREFIX} vs F.cross_entropy of all logits"
_BYTES: Final = f"{PREFIX}, bytes of those of all logits"


def benchmarks() -> list[Benchmark]:
    return [
        Benchmark(name=_TIMES, goal=f">= {GOAL:g} x", measure=_times),
        Benchmark(name=_BYTES, goal=f"<= {MOST_BYTES:g} %", measure=_bytes),
    ]


def _times(settings: Settings) -> Row:
    """Both alternate in one process, so that they read the same tensors."""
    settings.report(_TIMES)
    steps = max(1, settings.steps // 2)
    result = _result("--pairs", str(settings.pairs), "--steps", str(steps))
    row = compared(
        name=_TIMES,
        ours=result["ours"],
        peer=result["peer"],
        unit="s",
        goal=GOAL,
        note=f"loss and gradients within {result['difference']:.1e}; hidden size 512; "
        f"{_mib(result)}",
        device=device(),
        larger_is_better=False,
    )
    return _checked(row, result["difference"])


def _bytes(settings: Settings) -> Row:
    """Of one step each, without the inputs."""
    settings.report(_BYTES)
    result = _result("--pairs", "0")
    row = bounded(
        name=_BYTES,
        value=100 * result["ours_bytes"] / result["peer_bytes"],
        unit="%",
        limit=MOST_BYTES,
        note=f"{_mib(result)}, of which {result['gradient_bytes'] / 2**20:.0f} MiB are gradients",
        device=device(),
    )
    return _checked(row, result["difference"])


def _result(*words: str) -> dict[str, Any]:
    return worker("chunked_loss_worker", *words, variables=MEMORY)


def _mib(result: dict[str, Any]) -> str:
    ours, theirs = (result[f"{who}_bytes"] / 2**20 for who in ("ours", "peer"))
    return f"peak {ours:.0f} / {theirs:.0f} MiB"


def _checked(row: Row, difference: float) -> Row:
    if not difference <= TOLERANCE:  # also true for NaN
        return failed(row, f"not the same: {difference:.1e} apart, {TOLERANCE:g} allowed")
    return row
