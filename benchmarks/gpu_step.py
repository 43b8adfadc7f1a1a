"""A whole training step of a 1.3B-parameter Llama on one GPU: against each peer, and its peak.

docs/benchmarks.md says what a GPU has run. The parts that a CPU can run are tested.
"""

from __future__ import annotations

import functools
import sys
from typing import Final

from . import llama
from .end_to_end import LOSS_TOLERANCE, Peer, against, peak_gib
from .protocol import Benchmark, NotMeasured, Settings, run, worker
from .rows import NO_GPU, Row, compared

SHAPE: Final = llama.SHAPES["1.3b"]
WORDS: Final = ("--shape", "1.3b", "--device", "cuda", "--dtype", "bf16")
STEPS_FACTOR: Final = 5
"""GPU steps are short, and the first ones compile, tune and grow the memory pool."""
PEAK_TFLOPS: Final = 989.0
"""Dense bf16 peak of an H100 SXM or H200, from the vendor's data sheet."""
MFU_GOAL: Final = 0.42
MFU_NAME: Final = "step, 1.3B Llama bf16 on a GPU, share of 989 TFLOP/s"

PEERS: Final = (
    Peer(
        system="transformers-liger-compiled",
        label="transformers + Liger compiled",
        goal=1.0,
        note="aim 1.15 x",
        ours="ascend-run-compiled",
        python=lambda settings: settings.gpu_peers_python,
    ),
    Peer(
        system="litgpt-compiled",
        label="litgpt compiled",
        goal=1.0,
        note="aim 1.15 x",
        ours="ascend-run-compiled",
    ),
)


def benchmarks() -> list[Benchmark]:
    """One row per peer, and one for model FLOPs utilization."""
    against_peers = [
        Benchmark(
            name=_name(peer),
            goal=f">= {peer.goal:g} x",
            measure=functools.partial(_against, peer),
            device=device,
        )
        for peer in PEERS
    ]
    utilisation = Benchmark(
        name=MFU_NAME, goal=f">= {MFU_GOAL:g} x", measure=_utilisation, device=device
    )
    return [*against_peers, utilisation]


def _name(peer: Peer) -> str:
    return f"step, 1.3B Llama bf16 on a GPU vs {peer.label}"


def _against(peer: Peer, settings: Settings) -> Row:
    require_gpu()
    return against(peer, _name(peer), words_of(settings), LOSS_TOLERANCE["bf16"], settings)


def _utilisation(settings: Settings) -> Row:
    require_gpu()
    results = []
    for number in range(1, settings.pairs + 1):
        settings.report(f"{MFU_NAME}: {number} of {settings.pairs}")
        words = ("--system", "ascend-run-compiled", *words_of(settings))
        results.append(worker("end_to_end_worker", *words))
    speeds = [result["tokens_per_second"] for result in results]
    full = [tflops(speed, SHAPE, causal=False) / PEAK_TFLOPS for speed in speeds]
    return compared(
        name=MFU_NAME,
        ours=[tflops(speed, SHAPE) for speed in speeds],
        peer=[PEAK_TFLOPS] * len(speeds),
        unit="TFLOP/s",
        goal=MFU_GOAL,
        note=f"aim 0.52 x; up to {max(full):.3f} x in llm-foundry's convention; "
        f"peak {peak_gib(results):.2f} GiB",
        device=results[0]["device"],
    )


def tflops(tokens_per_second: float, shape: llama.Shape, *, causal: bool = True) -> float:
    """Return model TFLOP/s at this speed; ``Shape.flops_per_token`` has the two conventions."""
    return tokens_per_second * shape.flops_per_token(causal=causal) / 1e12


def words_of(settings: Settings) -> list[str]:
    steps, warmup = settings.steps * STEPS_FACTOR, settings.warmup * STEPS_FACTOR
    return [*WORDS, "--steps", str(steps), "--warmup", str(warmup)]


def device() -> str:
    """Return the GPU's name, or ``rows.NO_GPU``."""
    return _gpu()[0] or NO_GPU


def require_gpu() -> None:
    name, reason = _gpu()
    if not name:
        raise NotMeasured(f"{reason}; unverified, as no GPU has run this row yet")


@functools.cache
def _gpu() -> tuple[str, str]:
    """The GPU's name, and why there is none; determined once, in a process that imports torch."""
    program = (
        "import torch\n"
        "found = torch.cuda.is_available()\n"
        "print(torch.cuda.get_device_name() if found else '')\n"
        "print(f'needs a GPU; torch {torch.__version__} finds none here')"
    )
    name, reason = run([sys.executable, "-c", program]).stdout.splitlines()[-2:]
    return name, reason
