"""Fused operators on one GPU: against Liger's kernels, against eager, and in a whole step.

docs/benchmarks.md says what a GPU has run. The parts that a CPU can run are tested.
"""

from __future__ import annotations

import functools
from typing import Final

from .end_to_end import LOSS_TOLERANCE, Peer, against
from .gpu_step import device, require_gpu, words_of
from .operator_worker import OPERATORS
from .protocol import Benchmark, Settings, alternating, worker
from .rows import Row, compared

GOALS: Final = {"liger": 0.95, "eager": 1.5}
LABELS: Final = {"liger": "Liger's kernel", "eager": "eager"}
STEP: Final = Peer(
    system="ascend-run",
    label="without its fused operators",
    goal=1.05,
    ours="ascend-run-fused",
    python=lambda settings: None,
)
STEP_NAME: Final = f"step, 1.3B Llama bf16 on a GPU with fused operators vs {STEP.label}"


def benchmarks() -> list[Benchmark]:
    """One row per operator and comparison, and one for a step."""
    operators = [
        Benchmark(
            name=_name(operator, form),
            goal=f">= {goal:g} x",
            measure=functools.partial(_measure, operator, form),
            device=device,
        )
        for operator in OPERATORS
        for form, goal in GOALS.items()
    ]
    step = Benchmark(name=STEP_NAME, goal=f">= {STEP.goal:g} x", measure=_step, device=device)
    return [*operators, step]


def _name(operator: str, form: str) -> str:
    return f"{operator} on a GPU, forward and backward vs {LABELS[form]}"


def _measure(operator: str, form: str, settings: Settings) -> Row:
    require_gpu()
    words = ("--operator", operator, "--steps", str(10 * settings.steps))
    # Both run in the environment in which Liger is installed.
    run = functools.partial(worker, python=settings.gpu_peers_python)
    ours, theirs = alternating(
        settings,
        lambda: run("operator_worker", *words, "--form", "ours"),
        lambda: run("operator_worker", *words, "--form", form),
        _name(operator, form),
    )
    return compared(
        name=_name(operator, form),
        ours=[1e6 * result["seconds"] for result in ours],
        peer=[1e6 * result["seconds"] for result in theirs],
        unit="us",
        goal=GOALS[form],
        note="bf16, 2048 x 4 tokens, sizes of the 1.3B Llama",
        device=ours[0]["device"],
        larger_is_better=False,
    )


def _step(settings: Settings) -> Row:
    require_gpu()
    return against(STEP, STEP_NAME, words_of(settings), LOSS_TOLERANCE["bf16"], settings)
