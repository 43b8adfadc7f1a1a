"""What the recomputation of activation functions costs: a step with it, against one without."""

from __future__ import annotations

import functools
from typing import Final

from .end_to_end import Peer, against, our_python
from .protocol import Benchmark, Settings
from .rows import Row

PEER: Final = Peer(
    system="ascend-run",
    label="without",
    goal=0.971,  # a step takes at most 3 % longer
    note="equal losses: no bit changes",
    ours="ascend-run-recompute-activation",
    python=our_python,
)
_NAME: Final = "step, 36M Llama {} with recompute-activation vs without"


def benchmarks() -> list[Benchmark]:
    return [
        Benchmark(
            name=_NAME.format(dtype),
            goal=f">= {PEER.goal:g} x",
            measure=functools.partial(_measure, dtype),
        )
        for dtype in ("bf16", "fp32")
    ]


def _measure(dtype: str, settings: Settings) -> Row:
    words = ["--dtype", dtype, "--steps", str(settings.steps), "--warmup", str(settings.warmup)]
    return against(PEER, _NAME.format(dtype), words, 0.0, settings)
