"""What a plugin costs: a step with it, against one without."""

from __future__ import annotations

import functools
from typing import Final

import attrs

from .end_to_end import LOSS_TOLERANCE, Peer, against, our_python
from .protocol import Benchmark, Settings
from .rows import Row


@attrs.frozen(kw_only=True)
class Compared:
    """A plugin and what its step may cost."""

    plugin: str
    dtypes: tuple[str, ...] = ("bf16", "fp32")
    goal: float
    """Least share of the tokens per second without it."""
    bitwise: bool = True
    """Whether the losses are equal to the bit."""

    @property
    def peer(self) -> Peer:
        return Peer(
            system="ascend-run",
            label="without",
            goal=self.goal,
            note="equal losses: no bit changes" if self.bitwise else "",
            ours=f"ascend-run-{self.plugin}",
            python=our_python,
        )

    def name(self, dtype: str) -> str:
        return f"step, 36M Llama {dtype} with {self.plugin} vs without"


COMPARED: Final = (
    Compared(plugin="recompute-activation", goal=0.971),  # at most 3 % longer
    Compared(plugin="reuse-fp32-param", dtypes=("bf16",), goal=0.971),
    Compared(plugin="low-precision-optimizer", goal=0.909, bitwise=False),  # at most 10 %
)


def benchmarks() -> list[Benchmark]:
    return [
        Benchmark(
            name=compared.name(dtype),
            goal=f">= {compared.goal:g} x",
            measure=functools.partial(_measure, compared, dtype),
        )
        for compared in COMPARED
        for dtype in compared.dtypes
    ]


def _measure(compared: Compared, dtype: str, settings: Settings) -> Row:
    words = ["--dtype", dtype, "--steps", str(settings.steps), "--warmup", str(settings.warmup)]
    tolerance = 0.0 if compared.bitwise else LOSS_TOLERANCE[dtype]
    return against(compared.peer, compared.name(dtype), words, tolerance, settings)
