"""Generation: one stream and a batch beside transformers and litgpt, the first token, and the
cache's bytes."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from typing import Any, Final

import attrs

from .protocol import Benchmark, Settings, alternating, device, worker
from .rows import Row, bounded, compared, failed

MODEL: Final = "34M Llama fp32"
FIRST: Final = f"generate, first token of 512, {MODEL}: vs a plain forward"
BYTES: Final = "generate, bytes of the cache, of the formula"
ONE_GOAL: Final = 1.3
BATCH_GOAL: Final = 2.0
FIRST_GOAL: Final = 1 / 1.1
SAME_TOKENS: Final = 16
"""New tokens that must be equal; later ones may differ where two are equally probable."""


@attrs.frozen(kw_only=True)
class Peer:
    """Another system that generates."""

    system: str  #: As the worker calls it.
    shown: str
    work: str = "one"  #: ``one`` stream or the ``batch``.

    @property
    def name(self) -> str:
        works = {"one": "one stream", "batch": "16 requests of mixed lengths"}
        return f"generate, {works[self.work]}, {MODEL}: vs {self.shown}"

    @property
    def goal(self) -> float:
        return {"one": ONE_GOAL, "batch": BATCH_GOAL}[self.work]


PEERS: Final = (
    Peer(system="transformers", shown="transformers"),
    Peer(system="transformers-compiled", shown="transformers, compiled"),
    Peer(system="litgpt", shown="litgpt"),
    Peer(system="litgpt-compiled", shown="litgpt, compiled"),
    Peer(system="transformers", shown="transformers' batched generate", work="batch"),
    Peer(
        system="transformers-compiled",
        shown="transformers' batched generate, compiled",
        work="batch",
    ),
)


def benchmarks() -> list[Benchmark]:
    return [
        *(
            Benchmark(
                name=peer.name,
                goal=f">= {peer.goal:g} x",
                measure=functools.partial(_measure, peer),
            )
            for peer in PEERS
        ),
        Benchmark(name=FIRST, goal=f">= {FIRST_GOAL:.3g} x", measure=_first),
        Benchmark(name=BYTES, goal="<= 100 %", measure=_bytes),
    ]


def _measure(peer: Peer, settings: Settings) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        _run("write", "", folder, settings)
        ours, theirs = alternating(
            settings,
            lambda: _run("ascend-run", peer.work, folder, settings),
            lambda: _run(peer.system, peer.work, folder, settings),
            peer.name,
        )
    row = compared(
        name=peer.name,
        ours=[one["tokens_per_second"] for one in ours],
        peer=[one["tokens_per_second"] for one in theirs],
        unit="tokens/s",
        goal=peer.goal,
        note=f"greedy, {ours[0]['tokens']} new tokens with their prompts, weights loaded before",
        device=device(),
    )
    if problem := different(ours[0]["ids"], theirs[0]["ids"]):
        return failed(row, problem)
    return row


def different(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> str | None:
    """Return how two systems' new tokens differ in their first ones, or None."""
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if mine[:SAME_TOKENS] != other[:SAME_TOKENS]:
            return f"request {number}: {mine[:SAME_TOKENS]} are not {other[:SAME_TOKENS]}"
    return None


def _first(settings: Settings) -> Row:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        _run("write", "", folder, settings)
        for pair in range(1, settings.pairs + 1):
            settings.report(f"{FIRST}: pair {pair} of {settings.pairs}")
            found.append(_run("ascend-run", "first", folder, settings))
    return compared(
        name=FIRST,
        ours=[1000 * one["first_seconds"] for one in found],
        peer=[1000 * one["forward_seconds"] for one in found],
        unit="ms",
        goal=FIRST_GOAL,
        note=(
            "the faster of two forwards: of the same model, without a cache, with the logits of "
            "all tokens; and transformers', with those of the last one"
        ),
        device=device(),
        larger_is_better=False,
    )


def _bytes(settings: Settings) -> Row:
    settings.report(BYTES)
    with tempfile.TemporaryDirectory() as folder:
        _run("write", "", folder, settings)
        found = _run("ascend-run", "bytes", folder, settings)
    row = bounded(
        name=BYTES,
        value=100 * found["storages"] / found["formula"],
        unit="%",
        limit=100.0,
        note=f"pages of 16 requests, {found['storages'] / 1e6:.2f} MB in all layers",
        device=device(),
    )
    if found["storages"] < found["formula"]:
        return failed(row, f"{found['storages']} bytes are less than {found['formula']}")
    return row


def _run(system: str, work: str, folder: str, settings: Settings) -> dict[str, Any]:
    python = settings.peers_python if system.startswith("litgpt") else None
    words = ["--steps", str(settings.steps), "--warmup", str(settings.warmup)]
    return worker("generation_worker", system, work or "none", folder, *words, python=python)
