"""Time the MLPs of all experts, forward and backward, ours and a loop alternately; one JSON line.

The loop is our own, of the form of Megatron's SequentialMLP: each expert is a module with
parameters of its own. A loop that indexed stacked parameters would be slower by far, since each
index has a gradient of the size of the stack.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ascend_run.ops.experts.expert_mlp import expert_mlp

from . import llama

# T rows, H hidden size, F expert width, X experts

ROWS, HIDDEN = 2048, 512
Step = Callable[[], tuple[Tensor, ...]]
"""Runs forward and backward; returns the output, and the gradients of tokens, probs and weights."""


class Expert(nn.Module):
    """One expert, with Megatron's operations."""

    def __init__(self, fc1: Tensor, fc2: Tensor) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Parameter(fc1.clone()), nn.Parameter(fc2.clone())

    def forward(self, x: Tensor, probs: Tensor) -> Tensor:
        gate, up = F.linear(x, self.fc1).chunk(2, dim=-1)
        weighted = F.silu(gate) * up * probs.unsqueeze(-1)
        return F.linear(weighted.to(x.dtype), self.fc2)


def counts_of(experts: int, rows: int, *, skewed: bool) -> list[int]:
    """Rows of each expert: equal, or in proportion to 1, 1/2, 1/3 ... in a random order."""
    if not skewed:
        return [rows // experts] * experts
    shares = [1 / (1 + rank) for rank in range(experts)]
    counts = [int(rows * share / sum(shares)) for share in shares]
    counts[0] += rows - sum(counts)
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(3)).tolist()
    return [counts[rank] for rank in order]


def steps(counts: Sequence[int], ffn: int, dtype: torch.dtype) -> tuple[Step, Step]:
    """Ours and the loop, on the same rows and weights."""
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    num_rows, experts = sum(counts), len(counts)
    tokens, dout = drawn(num_rows, HIDDEN), drawn(num_rows, HIDDEN)
    probs = drawn(num_rows).sigmoid()
    fc1, fc2 = 0.04 * drawn(experts, 2 * ffn, HIDDEN), 0.04 * drawn(experts, HIDDEN, ffn)
    loop = nn.ModuleList(Expert(a, b) for a, b in zip(fc1, fc2, strict=True))
    leaves = [x.clone().requires_grad_() for x in (tokens, probs, fc1, fc2)]
    inputs = [x.clone().requires_grad_() for x in (tokens, probs)]
    own = [expert.get_parameter(name) for name in ("fc1", "fc2") for expert in loop]

    def ours() -> tuple[Tensor, ...]:
        out = expert_mlp(leaves[0], list(counts), *leaves[1:])
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    def peer() -> tuple[Tensor, ...]:
        parts = zip(loop, *(x.split(list(counts)) for x in inputs), strict=True)
        out = torch.cat([expert(x, p) for expert, x, p in parts])
        return out.detach(), *torch.autograd.grad(out, [*inputs, *own], dout)

    return ours, peer


def by_expert(results: Sequence[Tensor]) -> list[Tensor]:
    """Stack the gradients of the loop's experts: those of fc1, then those of fc2."""
    gradients = results[3:]
    half = len(gradients) // 2
    stacked = (torch.stack([*part]) for part in (gradients[:half], gradients[half:]))
    return [*results[:3], *stacked]


def difference(ours: Sequence[Tensor], peer: Sequence[Tensor]) -> float:
    """Return the largest difference, relative to the largest value of its tensor."""
    pairs = [(a.float(), b.float()) for a, b in zip(ours, peer, strict=True)]
    apart = torch.stack([(a - b).abs().max() / b.abs().max() for a, b in pairs])
    return float(apart.max())  # NaN if one of them is


def seconds_of(step: Step, repeats: int) -> float:
    """Return the median of some repetitions."""
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        step()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--ffn", type=int, default=256)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--skewed", action="store_true")
    parser.add_argument("--dtype", choices=llama.DTYPES, default="bf16")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args(arguments)
    counts = counts_of(options.experts, options.rows, skewed=options.skewed)
    ours, peer = steps(counts, options.ffn, llama.DTYPES[options.dtype])
    result: dict[str, Any] = {
        "difference": difference(ours(), by_expert(peer())),
        "fewest": min(counts),
        "most": max(counts),
        "ours": [],
        "peer": [],
    }
    for _ in range(options.pairs):
        for name, step in (("ours", ours), ("peer", peer)):
            result[name].append(seconds_of(step, options.steps))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
