"""Causal attention over one sequence, forward and backward; one JSON line.

``--packed``: the sequence consists of several documents with separate attention; default: one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

import torch

from .packed_attention import LENGTH, ends_of, pairs_of
from .ring_worker import MEMORY

HEADS, WIDTH = 8, 64


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of each step, the number of pairs, and the error of its first rows
    relative to the attention of a single document."""
    from ascend_run.core.model.attention import attend
    from ascend_run.plugin_api import AttentionSpec, Mask
    from ascend_run.plugins.platforms.cpu.attention import FusedCpuAttention

    torch.manual_seed(11)
    shape = (options.length, 1, HEADS, WIDTH)
    leaves = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    dout, kernel = torch.randn(shape), FusedCpuAttention()
    ends = ends_of(options.length) if options.packed else (options.length,)
    spec = AttentionSpec(scale=WIDTH**-0.5, mask=Mask(document_ends=ends))
    seconds = []
    for _ in range(options.warmup + options.steps):
        begin = time.perf_counter()
        out = attend(kernel, *leaves, spec)
        gradients = torch.autograd.grad(out, leaves, dout)
        seconds.append(time.perf_counter() - begin)
    first = ends[0]
    alone = [x[:first].detach().requires_grad_() for x in leaves]
    out_alone = attend(kernel, *alone, AttentionSpec(scale=WIDTH**-0.5))
    expected = (out_alone, *torch.autograd.grad(out_alone, alone, dout[:first]))
    return {
        "seconds": seconds[options.warmup :],
        "pairs": pairs_of(ends),
        "apart": max(
            ((a[:first] - b).abs().max() / b.abs().max()).item()
            for a, b in zip((out, *gradients), expected, strict=True)
        ),
    }


def main() -> None:
    if not MEMORY.items() <= os.environ.items():
        # The allocator reads it when a process starts.
        again = [sys.executable, "-m", "benchmarks.packed_worker", *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, **MEMORY})
    parser = argparse.ArgumentParser()
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=1)
    print(json.dumps(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
