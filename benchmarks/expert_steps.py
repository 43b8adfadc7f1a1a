"""A whole training step of a model of 64 experts, against Megatron's and transformers' experts."""

from __future__ import annotations

import functools
from typing import Final

from .end_to_end import LOSS_TOLERANCE, Peer, against, our_python
from .protocol import Benchmark, Settings
from .rows import Row

_NAME: Final = "step, 64 experts, 42M of 174M parameters active, fp32 vs "
_OURS: Final = "ours with gmm and moe-permute-fusion"
PEERS: Final = (
    Peer(
        system="megatron-local",
        label="megatron-core's sequential experts",
        goal=1.5,
        note=_OURS,
        ours="ascend-run-experts",
        python=our_python,
    ),
    Peer(
        system="transformers",
        label="transformers' grouped experts",
        goal=1.2,
        note=_OURS,
        ours="ascend-run-experts",
        python=our_python,
    ),
)


def benchmarks() -> list[Benchmark]:
    return [
        Benchmark(
            name=_NAME + peer.label,
            goal=f">= {peer.goal:g} x",
            measure=functools.partial(_measure, peer),
        )
        for peer in PEERS
    ]


def _measure(peer: Peer, settings: Settings) -> Row:
    words = ["--dtype", "fp32", "--shape", "64-experts"]
    words += ["--steps", str(settings.steps), "--warmup", str(settings.warmup)]
    return against(peer, _NAME + peer.label, words, LOSS_TOLERANCE["fp32"], settings)
