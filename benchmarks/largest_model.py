"""The largest model that trains in 4 GiB of resident memory, layer by layer, by real runs."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs

from .end_to_end import LOSS_TOLERANCE, largest_difference
from .protocol import Benchmark, NotMeasured, Settings, device, worker
from .rows import FOLDER, Row, compared, failed

LIMIT: Final = 4 * 2**30
FEW: Final = (4, 8)
"""Layers of the two runs from which the first guess is extrapolated."""
STEPS: Final = 3
GOAL: Final = 2.5
NAME: Final = "largest Llama in 4 GiB of memory, bf16 vs transformers with gradient checkpointing"
MEMORY: Final = {"MALLOC_MMAP_THRESHOLD_": str(2**17)}
"""Freed blocks of 128 KiB or more go back to the operating system, whatever is measured: glibc's
own threshold rises with the blocks that are freed, and then keeps more than is allocated."""


@attrs.frozen(kw_only=True)
class Trained:
    """What a run of some layers took, and that it trained."""

    parameters: int
    peak_bytes: int
    losses: Sequence[float]


def benchmarks() -> list[Benchmark]:
    return [Benchmark(name=NAME, goal=f">= {GOAL:g} x", measure=_measure)]


def largest(run: Callable[[int], Trained], limit: float = LIMIT) -> tuple[int, Trained]:
    """Return the most layers whose peak is within the limit, and their run. One layer more was run,
    too, and is not within it.

    Peaks are nearly linear in layers, so the first guess is off by few.
    """
    first, second = (run(layers).peak_bytes for layers in FEW)
    of_a_layer = (second - first) / (FEW[1] - FEW[0])
    layers = max(1, FEW[0] + math.floor((limit - first) / of_a_layer))
    fits = (found := run(layers)).peak_bytes <= limit
    while True:
        layers += 1 if fits else -1
        if layers == 0:
            raise NotMeasured(f"one layer takes {found.peak_bytes} bytes")
        last, found = found, run(layers)
        if (found.peak_bytes <= limit) is not fits:
            return (layers - 1, last) if fits else (layers, found)


def _measure(settings: Settings) -> Row:
    ours_few, ours = _search(settings, "ascend-run")
    peer_few, peer = _search(settings, "transformers")
    _, halves = _search(settings, "transformers-bf16")
    difference = largest_difference(ours_few.losses, peer_few.losses)
    peaks = " / ".join(f"{one.peak_bytes / 2**30:.2f}" for one in (ours, peer))
    row = compared(
        name=NAME,
        ours=[ours.parameters / 1e6],
        peer=[peer.parameters / 1e6],
        unit="million parameters",
        goal=GOAL,
        note=f"losses of {FEW[0]} layers within {difference:.1e}; peak {peaks} GiB; transformers "
        f"without float32 weights and moments: {halves.parameters / 1e6:.4g}",
        device=device(),
    )
    if not difference <= LOSS_TOLERANCE["bf16"]:  # also true for NaN
        return failed(row, f"not the same model: {ours_few.losses} against {peer_few.losses}")
    return row


def _search(settings: Settings, system: str) -> tuple[Trained, Trained]:
    """Return the run of the fewest layers, and the largest one."""
    runs: dict[int, Trained] = {}

    def run(layers: int) -> Trained:
        settings.report(f"{NAME}: {system}, {layers} layers")
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:  # not in memory, as /tmp may be
            runs[layers] = trained(system, layers, min(STEPS, settings.steps), folder)
        return runs[layers]

    _, found = largest(run)
    return runs[FEW[0]], found


def trained(system: str, layers: int, steps: int, folder: str) -> Trained:
    """Train in a new process.

    Raises:
        NotMeasured: A loss is not finite, or as ``protocol.worker``.
    """
    words = ("--system", system, "--layers", str(layers), "--steps", str(steps))
    result: dict[str, Any] = worker(
        "largest_model_worker", *words, "--folder", folder, variables=MEMORY
    )
    found = Trained(**result)
    if not all(map(math.isfinite, found.losses)):
        raise NotMeasured(f"{system} with {layers} layers: losses {found.losses}")
    return found
