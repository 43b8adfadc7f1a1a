"""Ulysses over a sequence on two ranks of one thread each, forward and backward; one JSON line.

Ours and the plain exchange get the same parts of queries, keys, values and the output's gradient,
and attend by the same kernel.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, Final

import torch
from torch import Tensor
from torch import distributed as dist

from .plain_ulysses import attend_by_exchange
from .ring_worker import (
    HEADS,
    NAMES,
    RANKS,
    SAMPLED_POSITIONS,
    SAMPLED_WIDTHS,
    WIDTH,
    Step,
    all_ranks,
    by_autograd,
    join,
    timed,
)

SYSTEMS: Final = ("ascend-run", "plain")


def whole_tensors(length: int, batch: int, groups: int) -> list[Tensor]:
    """q, k, v and the output's gradient, each [S, B, N or G, D]."""
    generator = torch.Generator().manual_seed(11)
    heads = (HEADS, groups, groups, HEADS)
    return [torch.randn(length, batch, number, WIDTH, generator=generator) for number in heads]


def step_of(system: str, parts: list[Tensor]) -> Step:
    """The road of a run, in one autograd function; or the kernel alone between plain exchanges."""

    from ascend_run.core.model.attention import attend
    from ascend_run.ops.attention.context_parallel.head_all_to_all import HeadAllToAll
    from ascend_run.plugin_api import AttentionSpec
    from ascend_run.plugins.platforms.cpu.attention import FusedCpuAttention

    inner, spec = FusedCpuAttention(), AttentionSpec(scale=WIDTH**-0.5)
    kernel = HeadAllToAll(inner, dist.group.WORLD)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(kernel, q, k, v, spec)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_by_exchange(lambda *whole: attend(inner, *whole, spec), q, k, v)

    return by_autograd(ours if system == "ascend-run" else plain, *parts)


def one_rank(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each step and, of the first, samples of what came out."""
    join(options)
    part = options.length // RANKS
    first = options.rank * part
    wholes = whole_tensors(options.length, options.batch, options.groups)
    step = step_of(options.system, [x[first : first + part] for x in wholes])
    found = {
        f"{name}/{first + row:06d}/{head}": tensor[row, -1, head, SAMPLED_WIDTHS].tolist()
        for name, tensor in zip(NAMES, step(), strict=True)
        for row in range(part)[SAMPLED_POSITIONS]
        for head in range(tensor.shape[2])
    }
    return {"seconds": timed(step, options), "samples": found}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", choices=SYSTEMS)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--store", default="")
    parser.add_argument("--rank", type=int)
    options = parser.parse_args()
    made = all_ranks(sys.argv[1:], "ulysses_worker") if options.rank is None else one_rank(options)
    print(json.dumps(made))


if __name__ == "__main__":
    main()
