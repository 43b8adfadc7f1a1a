"""Attention over a sequence on two ranks with one thread each, forward and backward; prints one
JSON line.

Every system gets the same queries, keys, values and output gradients, in its own layout. ``ideal``
is the same work without communication: half of the heads on each rank, with full sequences.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor
from torch import distributed as dist

RANKS: Final = 2
HEADS, WIDTH = 8, 64
MEMORY: Final = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**60)}
"""The allocator keeps freed memory, as in our runs; the same for all systems."""
SAMPLED_POSITIONS, SAMPLED_WIDTHS = slice(None, None, 509), slice(None, None, 16)
NAMES: Final = ("out", "dq", "dk", "dv")

Step = Callable[[], tuple[Tensor, ...]]
"""Runs forward and backward; returns output and gradients, [positions, heads, width] on this
rank."""


def whole_tensors(length: int) -> list[Tensor]:
    """q, k, v and the output's gradient, each [S, N, D]."""
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(length, HEADS, WIDTH, generator=generator) for _ in range(4)]


def zigzag(length: int, rank: int) -> Tensor:
    """Return the positions of a rank: chunks r and 2P - 1 - r of 2P."""
    chunks = torch.arange(length).chunk(2 * RANKS)
    return torch.cat((chunks[rank], chunks[2 * RANKS - 1 - rank]))


def by_autograd(call: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Step:
    leaves = [x.contiguous().requires_grad_() for x in (q, k, v)]
    dout = dout.contiguous()

    def step() -> tuple[Tensor, ...]:
        out = call(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    return step


def ascend_run(parts: list[Tensor], *, alone: bool) -> Step:
    """As in a run: the platform's kernel, in the ring or alone, in one autograd function."""

    from ascend_run.core.model.attention import attend
    from ascend_run.ops.attention.context_parallel.partitions import ZigZag
    from ascend_run.ops.attention.context_parallel.ring import RingRoute
    from ascend_run.ops.attention.context_parallel.shared_attention import SharedAttention
    from ascend_run.plugin_api import AttentionSpec
    from ascend_run.plugins.platforms.cpu.attention import FusedCpuAttention

    inner = FusedCpuAttention()
    route = RingRoute(dist.group.WORLD, ZigZag())
    kernel = inner if alone else SharedAttention(inner, route)
    spec = AttentionSpec(scale=WIDTH**-0.5)
    step = by_autograd(lambda q, k, v: attend(kernel, q, k, v, spec), *(x[:, None] for x in parts))
    return lambda: tuple(x[:, 0] for x in step())


def ring_flash_attn(parts: list[Tensor]) -> Step:
    """zhuzilin/ring-flash-attention, with torch's CPU kernel instead of flash-attn's."""
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def _flash_attn_forward(
        q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size_left=-1,
        window_size_right=-1, alibi_slopes=None, return_softmax=False,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = forward(*heads_first, is_causal=causal, scale=softmax_scale)
        return out.transpose(1, 2), lse, None, None

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size_left=-1, window_size_right=-1, alibi_slopes=None,
        deterministic=False,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        heads_first = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        found = backward(*heads_first, softmax_lse, 0.0, causal, scale=softmax_scale)
        for place, gradient in zip((dq, dk, dv), found, strict=True):
            place.copy_(gradient.transpose(1, 2))

    interface = ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_forward = _flash_attn_forward  # type: ignore[attr-defined]
    interface._flash_attn_backward = _flash_attn_backward  # type: ignore[attr-defined]
    # Imported without the package's __init__, which imports adapters for transformers.
    package = ModuleType("ring_flash_attn")
    spec = importlib.util.find_spec("ring_flash_attn")
    assert spec is not None
    package.__path__ = spec.submodule_search_locations or []
    sys.modules |= {
        "flash_attn": ModuleType("flash_attn"),
        "flash_attn.flash_attn_interface": interface,
        "ring_flash_attn": package,
    }
    module = importlib.import_module("ring_flash_attn.zigzag_ring_flash_attn")
    # In float32 its sums would be the buffers that the next block is written to, and wrong.
    source = inspect.getsource(module.zigzag_ring_flash_attn_backward)
    alias, copy = "_buffer.to(torch.float32)", "_buffer.to(torch.float32, copy=True)"
    assert source.count(alias) == 3
    exec(compile(source.replace(alias, copy), str(module.__file__), "exec"), vars(module))
    attention = module.zigzag_ring_flash_attn_func
    step = by_autograd(
        lambda q, k, v: attention(q, k, v, causal=True, group=dist.group.WORLD),
        *(x[None] for x in parts),
    )
    return lambda: tuple(x[0] for x in step())


def one_rank(options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of each step, and samples of the first step's results."""
    join(options)
    positions, heads = torch.arange(options.length), torch.arange(HEADS)
    if options.system == "ideal":
        heads = heads.chunk(RANKS)[options.rank]
    else:
        positions = zigzag(options.length, options.rank)
    parts = [x[positions][:, heads] for x in whole_tensors(options.length)]
    if options.system == "ring-flash-attn":
        step = ring_flash_attn(parts)
    else:
        step = ascend_run(parts, alone=options.system == "ideal")
    found = samples(step(), positions.tolist(), heads.tolist())
    return {"seconds": timed(step, options), "samples": found}


def join(options: argparse.Namespace) -> None:
    """Set one thread for this rank, and initialize the process group."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(options.store, RANKS)
    dist.init_process_group("gloo", store=store, rank=options.rank, world_size=RANKS)


def timed(step: Step, options: argparse.Namespace) -> list[float]:
    """Return the seconds of each step after the first one; destroys the process group."""
    seconds = []
    for index in range(options.warmup - 1 + options.steps):
        dist.barrier()
        begin = time.perf_counter()
        step()
        if index >= options.warmup - 1:
            seconds.append(time.perf_counter() - begin)
    dist.barrier()
    dist.destroy_process_group()
    return seconds


def samples(
    tensors: tuple[Tensor, ...], positions: list[int], heads: list[int]
) -> dict[str, list[float]]:
    """Return ``name/position/head`` -> some elements, the same for every layout."""
    wanted = {*range(max(positions) + 1)[SAMPLED_POSITIONS]}
    return {
        f"{name}/{position:06d}/{head}": tensor[row, column, SAMPLED_WIDTHS].tolist()
        for name, tensor in zip(NAMES, tensors, strict=True)
        for row, position in enumerate(positions)
        if position in wanted
        for column, head in enumerate(heads)
    }


def all_ranks(arguments: list[str], module: str = "ring_worker") -> dict[str, Any]:
    """Run all ranks; the time of a step is that of its slowest rank."""
    environment = {**os.environ, **MEMORY, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
        command += ["--store", str(Path(folder) / "store"), "--rank"]
        processes = [
            subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.PIPE)
            for rank in range(RANKS)
        ]
        results = [json.loads(p.communicate()[0].splitlines()[-1]) for p in processes]
    merged: dict[str, list[float]] = {}
    for result in results:
        merged |= result["samples"]
    return {
        "seconds": [max(both) for both in zip(*(a["seconds"] for a in results), strict=True)],
        "samples": dict(sorted(merged.items())),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", choices=["ascend-run", "ideal", "ring-flash-attn"])
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--store", default="")
    parser.add_argument("--rank", type=int)
    options = parser.parse_args()
    print(json.dumps(all_ranks(sys.argv[1:]) if options.rank is None else one_rank(options)))


if __name__ == "__main__":
    main()
