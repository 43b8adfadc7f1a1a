"""A whole training step of a 36M-parameter Llama, against each peer on the same losses."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from .protocol import Benchmark, Settings, alternating, device, worker
from .rows import Row, compared, failed

LOSS_TOLERANCE: Final = {"fp32": 2e-4, "bf16": 1e-3}
"""Maximum relative difference of a step's losses. In bf16 the peers' weights are bf16 without
float32 master weights, so that small updates are lost."""
COMPARED_STEPS: Final = 4


@attrs.frozen(kw_only=True)
class Peer:
    """Another system, and our goal relative to it."""

    system: str
    label: str
    goal: float
    note: str = ""
    ours: str = "ascend-run"
    python: Callable[[Settings], Path | None] = lambda settings: settings.peers_python
    """Python of the environment that it is installed in; None: this one."""
    variables: Mapping[str, str] = attrs.field(factory=dict)
    """Environment variables for both systems."""


def our_python(_: Settings) -> None:
    """transformers is in this environment, since tests compare with it."""


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

SLOWER_BF16: Final = Peer(
    system="litgpt",
    label="litgpt, where bf16 products are the slower ones",
    goal=1.3,
    note="both with ONEDNN_MAX_CPU_ISA=AVX512_CORE, which stands in for such a processor",
    variables={"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
)


def benchmarks() -> list[Benchmark]:
    """One row per precision and peer, and one on another kind of processor."""
    return [
        Benchmark(
            name=_name(dtype, peer),
            goal=f">= {peer.goal:g} x",
            measure=functools.partial(_measure, dtype, peer),
        )
        for dtype, peer in (*itertools.product(("bf16", "fp32"), PEERS), ("bf16", SLOWER_BF16))
    ]


def _name(dtype: str, peer: Peer) -> str:
    return f"step, 36M Llama {dtype} vs {peer.label}"


def _measure(dtype: str, peer: Peer, settings: Settings) -> Row:
    words = ["--dtype", dtype, "--steps", str(settings.steps), "--warmup", str(settings.warmup)]
    return against(peer, _name(dtype, peer), words, LOSS_TOLERANCE[dtype], settings)


def against(
    peer: Peer, name: str, words: Sequence[str], loss_tolerance: float, settings: Settings
) -> Row:
    """Return the row of a peer: both train alternately; it fails if their losses differ.

    Args:
        words: Arguments of the worker for both.
    """
    ours, theirs = alternating(
        settings,
        lambda: worker(
            "end_to_end_worker", "--system", peer.ours, *words, variables=peer.variables
        ),
        lambda: worker(
            "end_to_end_worker",
            "--system",
            peer.system,
            *words,
            python=peer.python(settings),
            variables=peer.variables,
        ),
        name,
    )
    return compared_steps(
        ours,
        theirs,
        name=name,
        goal=peer.goal,
        loss_tolerance=loss_tolerance,
        notes=[f"peak {peak_gib(ours):.2f} / {peak_gib(theirs):.2f} GiB", peer.note],
        device=ours[0]["device"] or device(),
    )


def compared_steps(
    ours: Sequence[Mapping[str, Any]],
    peer: Sequence[Mapping[str, Any]],
    *,
    name: str,
    goal: float,
    loss_tolerance: float,
    device: str,
    notes: Sequence[str] = (),
) -> Row:
    """Return the row of speeds from alternating pairs of runs; it fails if their losses differ.

    Args:
        ours: ``losses`` and ``tokens_per_second`` of each run; of ``peer`` too.
        loss_tolerance: Maximum relative difference.
    """
    difference = largest_difference(ours[0]["losses"], peer[0]["losses"])
    row = compared(
        name=name,
        ours=[result["tokens_per_second"] for result in ours],
        peer=[result["tokens_per_second"] for result in peer],
        unit="tokens/s",
        goal=goal,
        note="; ".join(filter(None, [f"losses within {difference:.1e}", *notes])),
        device=device,
    )
    if not difference <= loss_tolerance:  # also true for NaN
        reason = f"not the same model: losses {_shown(ours)} against {_shown(peer)}"
        return failed(row, reason)
    return row


def largest_difference(ours: Sequence[float], peer: Sequence[float]) -> float:
    """Return the maximum relative difference of the first steps' losses; NaN if one is NaN."""
    pairs = list(zip(ours, peer, strict=True))[:COMPARED_STEPS]
    differences = [abs(a - b) / abs(b) for a, b in pairs]
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def peak_gib(results: Sequence[dict[str, Any]]) -> float:
    """Return the peak memory over all processes."""
    return max(result["peak_bytes"] for result in results) / 2**30


def _shown(results: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{loss:.5f}" for loss in results[0]["losses"][:COMPARED_STEPS])
