"""Train a Llama of some layers in a fresh process; print its size, losses and peak memory as JSON.

Products are bf16. ``transformers`` and ours have float32 weights, ``transformers-bf16`` has none.
"""

from __future__ import annotations

import argparse
import json
import resource
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import attrs
import torch

from benchmarks import llama, peer_steps
from benchmarks.end_to_end_worker import opened
from benchmarks.peer_steps import Setting, Step

SHAPE: Final = llama.Shape(
    layers=0, hidden=1024, ffn=2816, heads=16, vocab=16384, seq_length=256, micro_batch=1
)
TINY: Final = attrs.evolve(SHAPE, hidden=64, ffn=176, heads=2, vocab=512, seq_length=64)
"""For tests of the systems."""
ENABLED: Final = ("recompute", "low-precision-optimizer", "swap-optimizer")


def ours(shape: llama.Shape, folder: str) -> Step:
    """Return a step with bf16 weights, recomputed layers, and moments in 8 bits and float32 weights
    in files."""
    options = (f"plugins.swap-optimizer.folder={folder}", "plugins.cpu.keep_freed_memory=false")
    return opened(shape, "bf16", enable=ENABLED, options=options)


def peer(shape: llama.Shape, dtype: torch.dtype) -> Step:
    return peer_steps.transformers_recomputing(Setting(shape=shape, dtype=dtype, device="cpu"))


SYSTEMS: Final[Mapping[str, Callable[[llama.Shape, str], Step]]] = {
    "ascend-run": ours,
    "transformers": lambda shape, _: peer(shape, torch.float32),
    "transformers-bf16": lambda shape, _: peer(shape, torch.bfloat16),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", choices=SYSTEMS, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--folder", required=True, help="of files without names; on a disk")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    shape = attrs.evolve(TINY if options.tiny else SHAPE, layers=options.layers)
    step = SYSTEMS[options.system](shape, options.folder)
    result = {
        "parameters": shape.num_parameters(),
        "losses": [step(index) for index in range(options.steps)],
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
