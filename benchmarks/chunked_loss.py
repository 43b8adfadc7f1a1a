"""The loss of a large vocabulary, and the log-probability of each label, forward and backward:
chunks of logits against all of them."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import attrs

from .protocol import Benchmark, Settings, device, worker
from .ring_worker import MEMORY
from .rows import Row, bounded, compared, failed

TOLERANCE: Final = 2e-2
"""As ``expert_mlps``."""
SIZES: Final = "65536 words, 8192 tokens, bf16"
MOST_BYTES: Final = 15.0
"""Percent of the bytes that all logits take."""


@attrs.frozen(kw_only=True)
class _Case:
    """Two rows: times, and bytes."""

    name: str
    peer: str
    goal: float
    words: tuple[str, ...] = ()
    """Arguments of the worker."""

    @property
    def times(self) -> str:
        return f"{self.name}, {SIZES} vs {self.peer} of all logits"

    @property
    def bytes(self) -> str:
        return f"{self.name}, {SIZES}, bytes of those of all logits"


CASES: Final = (
    _Case(name="cross-entropy", peer="F.cross_entropy", goal=1.3),
    # A matmul more than the peer's three.
    _Case(name="log-probabilities", peer="F.log_softmax", goal=1.0, words=("--by-token",)),
)


def benchmarks() -> list[Benchmark]:
    return [
        benchmark
        for case in CASES
        for benchmark in (
            Benchmark(name=case.times, goal=f">= {case.goal:g} x", measure=partial(_times, case)),
            Benchmark(name=case.bytes, goal=f"<= {MOST_BYTES:g} %", measure=partial(_bytes, case)),
        )
    ]


def _times(case: _Case, settings: Settings) -> Row:
    """Both alternate in one process, so that they read the same tensors."""
    settings.report(case.times)
    steps = max(1, settings.steps // 2)
    result = _result(*case.words, "--pairs", str(settings.pairs), "--steps", str(steps))
    row = compared(
        name=case.times,
        ours=result["ours"],
        peer=result["peer"],
        unit="s",
        goal=case.goal,
        note=f"values and gradients within {result['difference']:.1e}; hidden size 512; "
        f"{_mib(result)}",
        device=device(),
        larger_is_better=False,
    )
    return _checked(row, result["difference"])


def _bytes(case: _Case, settings: Settings) -> Row:
    """Of one step each, without the inputs."""
    settings.report(case.bytes)
    result = _result(*case.words, "--pairs", "0")
    row = bounded(
        name=case.bytes,
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
