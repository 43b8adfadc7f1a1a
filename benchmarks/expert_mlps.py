"""The MLPs of all experts, forward and backward: plugin ``gmm`` against a loop over experts."""

from __future__ import annotations

import functools
import itertools
from typing import Final

import attrs

from .protocol import Benchmark, Settings, device, worker
from .ring_worker import MEMORY
from .rows import Row, compared, failed

TOLERANCE: Final = {"bf16": 2e-2, "fp32": 1e-5}
"""Maximum difference of results, relative to the tensor's largest value: bf16 rounds each of them
at other places."""
REPEATS: Final = 2
"""They are short, so a pair has so many for each step that the settings ask for."""


@attrs.frozen(kw_only=True)
class Case:
    """Sizes of the experts, and how 2048 rows are distributed over them."""

    experts: int
    ffn: int
    skewed: bool
    dtype: str

    @property
    def goal(self) -> float:
        if self.dtype == "fp32":
            return 0.95
        return 2.5 if self.experts == 64 and not self.skewed else 1.3

    @property
    def name(self) -> str:
        loads = "skewed" if self.skewed else "balanced"
        return f"{self.experts} experts' MLPs, {loads}, {self.dtype} vs a loop over them"


CASES: Final = [
    Case(experts=experts, ffn=ffn, skewed=skewed, dtype=dtype)
    for (experts, ffn), skewed, dtype in itertools.product(
        ((8, 1024), (64, 256), (128, 128)), (False, True), TOLERANCE
    )
]


def benchmarks() -> list[Benchmark]:
    return [
        Benchmark(
            name=case.name, goal=f">= {case.goal:g} x", measure=functools.partial(_measure, case)
        )
        for case in CASES
    ]


def _measure(case: Case, settings: Settings) -> Row:
    """Both alternate in one process, since they are shorter than the start of one."""
    settings.report(case.name)
    words = ["--experts", str(case.experts), "--ffn", str(case.ffn), "--dtype", case.dtype]
    words += ["--pairs", str(settings.pairs), "--steps", str(REPEATS * settings.steps)]
    words += ["--skewed"] if case.skewed else []
    result = worker("expert_mlps_worker", *words, variables=MEMORY)
    difference, tolerance = result["difference"], TOLERANCE[case.dtype]
    row = compared(
        name=case.name,
        ours=[1e3 * seconds for seconds in result["ours"]],
        peer=[1e3 * seconds for seconds in result["peer"]],
        unit="ms",
        goal=case.goal,
        note=f"output and gradients within {difference:.1e}; 512 -> {case.ffn}, "
        f"{result['fewest']} to {result['most']} rows of an expert",
        device=device(),
        larger_is_better=False,
    )
    if not difference <= tolerance:  # also true for NaN
        return failed(row, f"not the same: {difference:.1e} apart, {tolerance:g} allowed")
    return row
