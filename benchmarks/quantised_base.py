"""QLoRA: bytes of the quantised weights, and a step against PEFT with bitsandbytes."""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any, Final

from .end_to_end import compared_steps
from .protocol import Benchmark, Settings, alternating, device, run, worker
from .rows import Row, bounded

BYTES: Final = "qlora, bytes of quantised linears, of those in bf16"
WHOLE: Final = "qlora, bytes of the base of a 7B Llama, of those in bf16"
STEP: Final = "step, 17M Llama bf16 with qlora vs PEFT with bitsandbytes"
MOST: Final = 29.0
"""Percent: 25 for the codes, 0.78 for a scale of 8 bits per 64 weights, and the rest."""
LARGE: Final = (
    "model.family=llama model.num_layers=32 model.hidden_size=4096 model.ffn_hidden_size=11008 "
    "model.num_attention_heads=32 model.num_query_groups=32 model.vocab_size=32000 "
    "data.seq_length=2048 data.train=none data.tokenizer=none train.precision=bf16 "
    "plugins.lora.rank=1"
)
GOAL: Final = 1.0
TOLERANCE: Final = 1e-3
"""Maximum relative difference of a step's losses in bf16."""


def benchmarks() -> list[Benchmark]:
    return [
        Benchmark(name=BYTES, goal=f"<= {MOST:g} %", measure=_bytes),
        Benchmark(name=WHOLE, goal=f"<= {MOST:g} %", measure=_whole),
        Benchmark(name=STEP, goal=f">= {GOAL:g} x", measure=_step),
    ]


def _bytes(settings: Settings) -> Row:
    settings.report(BYTES)
    with tempfile.TemporaryDirectory() as folder:
        _run("write", folder, settings)
        found = _run("ascend-run", folder, settings)
    linears, model = found["linears"], found["model"]
    return bounded(
        name=BYTES,
        value=100 * linears["held"] / linears["in_bf16"],
        unit="%",
        limit=MOST,
        note=(
            f"storages of codes and scales, {linears['held'] / 1e6:.2f} MB; with embedding, output "
            f"layer and norms, which stay in bf16, {100 * model['held'] / model['in_bf16']:.1f} %"
        ),
        device=device(),
    )


def _whole(settings: Settings) -> Row:
    settings.report(WHOLE)
    in_bf16, held = (_planned(features) for features in ("lora", "lora,qlora"))
    return bounded(
        name=WHOLE,
        value=100 * held / in_bf16,
        unit="%",
        limit=MOST,
        note=(
            f"all weights, by plan: {held / 1e9:.2f} of {in_bf16 / 1e9:.2f} GB, with embedding, "
            "output layer, norms and adapters of rank 1, which stay in bf16"
        ),
        device=device(),
    )


def _planned(features: str) -> int:
    """Return the bytes of all weights by ``plan``."""
    command = [sys.executable, "-m", "ascend_run", "plan", "--json", "--enable", features]
    (stage,) = json.loads(run([*command, *LARGE.split()]).stdout)["cost"]["stages"]
    weights: int = stage["memory"]["weights"]
    return weights


def _step(settings: Settings) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        _run("write", folder, settings)
        ours, theirs = alternating(
            settings,
            lambda: _run("ascend-run", folder, settings),
            lambda: _run("peft", folder, settings),
            STEP,
        )
    return compared_steps(
        ours,
        theirs,
        name=STEP,
        goal=GOAL,
        loss_tolerance=TOLERANCE,
        notes=["adapters of rank 8 on every linear"],
        device=device(),
    )


def _run(what: str, folder: str, settings: Settings) -> dict[str, Any]:
    words = ["--steps", str(settings.steps), "--warmup", str(settings.warmup)]
    return worker("quantised_base_worker", what, folder, *words)
