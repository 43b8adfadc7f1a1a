"""A whole training step of a 36M-parameter Llama, against each peer on the same losses."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from .protocol import Benchmark, Settings, alternating, device, worker
from .rows import Row, compared, failed

LOSS_TOLERANCE: Final = {"fp32": 2e-4, "bf16": 1e-3}
"""Largest relative difference of a step's losses. In bf16 the peers' weights themselves are bf16,
so a step below half a unit of a weight is lost, where ours has float32 master weights."""
COMPARED_STEPS: Final = 4


@attrs.frozen(kw_only=True)
class Peer:
    """One system beside ours, and what is asked of ours against it."""

    system: str
    label: str
    goal: float
    note: str = ""
    ours: str = "ascend-run"
    python: Callable[[Settings], Path | None] = lambda settings: settings.peers_python
    """Of the environment that it is installed in; None is our own."""


def our_python(_: Settings) -> None:
    """transformers is there already: tests compare with it."""


PEERS: Final = (
    Peer(system="megatron-local", label="megatron-core local spec", goal=1.35, note="aim 1.65 x"),
    Peer(system="litgpt", label="litgpt", goal=1.0),
    Peer(system="litgpt-compiled", label="litgpt compiled (aim)", goal=1.05),
    Peer(
        system="litgpt-compiled",
        label="litgpt compiled, both compiled",
        goal=0.95,
        ours="ascend-run-compiled",
    ),
    Peer(
        system="transformers-compiled",
        label="transformers compiled, both compiled",
        goal=0.95,
        ours="ascend-run-compiled",
        python=our_python,
    ),
)


def benchmarks() -> list[Benchmark]:
    """One row for every precision and peer."""
    return [
        Benchmark(
            name=_name(dtype, peer),
            goal=f">= {peer.goal:g} x",
            measure=functools.partial(_measure, dtype, peer),
        )
        for dtype in ("bf16", "fp32")
        for peer in PEERS
    ]


def _name(dtype: str, peer: Peer) -> str:
    return f"step, 36M Llama {dtype} vs {peer.label}"


def _measure(dtype: str, peer: Peer, settings: Settings) -> Row:
    words = ["--dtype", dtype, "--steps", str(settings.steps), "--warmup", str(settings.warmup)]
    return against(peer, _name(dtype, peer), words, LOSS_TOLERANCE[dtype], settings)


def against(
    peer: Peer, name: str, words: Sequence[str], loss_tolerance: float, settings: Settings
) -> Row:
    """The row of a peer: both trained by turns, and failed where their losses differ.

    Args:
        words: What the worker is told of both.
    """
    ours, theirs = alternating(
        settings,
        lambda: worker("end_to_end_worker", "--system", peer.ours, *words),
        lambda: worker(
            "end_to_end_worker", "--system", peer.system, *words, python=peer.python(settings)
        ),
        name,
    )
    difference = largest_difference(ours[0]["losses"], theirs[0]["losses"])
    notes = [
        f"losses within {difference:.1e}",
        f"peak {peak_gib(ours):.2f} / {peak_gib(theirs):.2f} GiB",
        peer.note,
    ]
    row = compared(
        name=name,
        ours=[answer["tokens_per_second"] for answer in ours],
        peer=[answer["tokens_per_second"] for answer in theirs],
        unit="tokens/s",
        goal=peer.goal,
        note="; ".join(note for note in notes if note),
        device=ours[0]["device"] or device(),
    )
    if not difference <= loss_tolerance:  # so written, a nan fails too
        reason = f"not the same model: losses {_shown(ours)} against {_shown(theirs)}"
        return failed(row, reason)
    return row


def largest_difference(ours: Sequence[float], peer: Sequence[float]) -> float:
    """Largest relative difference of the first steps' losses; nan where one is."""
    pairs = list(zip(ours, peer, strict=True))[:COMPARED_STEPS]
    differences = [abs(a - b) / abs(b) for a, b in pairs]
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def peak_gib(answers: Sequence[dict[str, Any]]) -> float:
    """Largest memory of any of the processes."""
    return max(answer["peak_bytes"] for answer in answers) / 2**30


def _shown(answers: Sequence[dict[str, Any]]) -> str:
    return ", ".join(f"{loss:.5f}" for loss in answers[0]["losses"][:COMPARED_STEPS])
