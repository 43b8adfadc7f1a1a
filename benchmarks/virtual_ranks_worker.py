"""Time causal attention, forward and backward, on one device; prints one JSON line.

``--form ranks``: the blocks of every rank of a ring, one after the other, cut, merged and summed by
the ring's own code, with no messages between. ``--form one``: one call of torch's attention.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from ascend_run.ops.attention.context_parallel.blocks import holder, ring_steps
from ascend_run.ops.attention.context_parallel.inner import block_backward, block_spec
from ascend_run.ops.attention.context_parallel.partitions import ZigZag
from ascend_run.ops.attention.context_parallel.sums import Attended, KeySums, RowSums
from ascend_run.ops.transfer.ring import Packing
from ascend_run.plugin_api import AttentionKernel, AttentionSpec, Mask

# S sequence, N heads, D head width; a batch of one

RANKS: Final = 8
SIZES: Final = {"large": (16384, 16, 128), "tiny": (64, 2, 8)}
"""S, N and D."""
FORMS: Final = ("ranks", "one")

Step = Callable[[], tuple[Tensor, ...]]
"""Output and gradients of q, k and v; each [S, 1, N, D], or each in the parts of the ranks."""


class VirtualRanks:
    """A ring of ranks that are all here.

    Args:
        tensors: q, k, v and the output's gradient, each [S, 1, N, D]; each rank's part of them is
            laid out beforehand, as ranks have it.
    """

    def __init__(self, kernel: AttentionKernel, tensors: Sequence[Tensor], ranks: int) -> None:
        self._kernel, self._ranks = kernel, ranks
        length, width = tensors[0].shape[0], tensors[0].shape[-1]
        self._spec = AttentionSpec(scale=width**-0.5)
        partition, mask = ZigZag(), Mask()
        self.rows = [
            torch.cat([torch.arange(*span) for span in partition.chunks(length, rank, ranks)])
            for rank in range(ranks)
        ]
        self._parts = [[x[rows.to(x.device)] for rows in self.rows] for x in tensors]
        self._steps = [
            ring_steps(mask, partition, length, length, rank, ranks, ranks) for rank in range(ranks)
        ]
        self._packing = Packing([self._parts[1][0].shape, self._parts[2][0].shape])

    def step(self) -> tuple[list[Tensor], ...]:
        """Forward of every rank, then backward of every rank."""
        queries, keys, values, douts = self._parts
        held = [self._packing.pack([k, v]) for k, v in zip(keys, values, strict=True)]
        outcomes = [self._forward(rank, q, held) for rank, q in enumerate(queries)]
        sums: list[Tensor | None] = [None] * self._ranks
        dq = [
            self._backward(rank, (douts[rank], q), outcomes[rank], held, sums)
            for rank, q in enumerate(queries)
        ]
        gradients = [
            [x.to(dq[0].dtype) for x in self._packing.views(total)]
            for total in sums
            if total is not None
        ]
        return (
            [out for out, _ in outcomes],
            dq,
            [k for k, _ in gradients],
            [v for _, v in gradients],
        )

    def _owner(self, rank: int, step: int) -> int:
        return holder(rank, step, self._ranks, self._ranks)

    def _forward(self, rank: int, q: Tensor, held: list[Tensor]) -> tuple[Tensor, Tensor]:
        attended = Attended(q, q.shape[-1])
        for step, blocks in enumerate(self._steps[rank]):
            k, v = self._packing.views(held[self._owner(rank, step)])
            for block in blocks:
                spec = block_spec(self._spec, block, 0, None)
                part = self._kernel.forward(q[block.rows], k[block.columns], v[block.columns], spec)
                attended.add(block, part.out, part.lse)
        return attended.result(None)

    def _backward(
        self,
        rank: int,
        given: tuple[Tensor, Tensor],
        outcome: tuple[Tensor, Tensor],
        held: list[Tensor],
        sums: list[Tensor | None],
    ) -> Tensor:
        dout, q = given
        out, lse = outcome
        row_sums = RowSums(q)
        for step, blocks in enumerate(self._steps[rank]):
            owner = self._owner(rank, step)
            k, v = self._packing.views(held[owner])
            key_sums = KeySums(self._packing, q)
            for block in blocks:
                dq, dk, dv = block_backward(
                    self._kernel,
                    block,
                    (dout, q, out, lse),
                    k[block.columns],
                    v[block.columns],
                    (),
                    block_spec(self._spec, block, 0, None),
                )
                row_sums.add(block, dq)
                key_sums.add(block, dk, dv)
            sums[owner] = key_sums.onto(sums[owner])
        return row_sums.result()

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """The ranks' rows, each at its position."""
        return torch.cat([*parts])[torch.cat(self.rows).argsort().to(parts[0].device)]


def one_call(tensors: Sequence[Tensor]) -> Step:
    """torch's attention, which takes the heads before the positions."""
    *leaves, dout = (x.permute(1, 2, 0, 3).contiguous() for x in tensors)
    leaves = [leaf.requires_grad_() for leaf in leaves]

    def step() -> tuple[Tensor, ...]:
        out = F.scaled_dot_product_attention(*leaves, is_causal=True)
        gradients = torch.autograd.grad(out, leaves, dout)
        return tuple(x.detach().permute(2, 0, 1, 3) for x in (out, *gradients))

    return step


def inputs(size: str, device: str, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    length, heads, width = SIZES[size]
    generator = torch.Generator(device=device).manual_seed(0)
    shape = (length, 1, heads, width)
    return [torch.randn(shape, device=device, generator=generator).to(dtype) for _ in range(4)]


def platform_kernel(device: str) -> AttentionKernel:
    """The fused one that a run on the device takes by itself."""
    if device == "cuda":
        from ascend_run.plugins.platforms.cuda.attention import FusedCudaAttention

        return FusedCudaAttention()
    from ascend_run.plugins.platforms.cpu.attention import FusedCpuAttention

    return FusedCpuAttention()


def measure(
    form: str, tensors: Sequence[Tensor], ranks: int, warmup: int, steps: int
) -> dict[str, Any]:
    """Seconds of each step, and how far the ranks' output and gradients are from one call's."""
    is_cuda = tensors[0].is_cuda
    virtual = VirtualRanks(platform_kernel(tensors[0].device.type), tensors, ranks)
    step: Callable[[], Any] = virtual.step if form == "ranks" else one_call(tensors)
    seconds = []
    with torch.no_grad() if form == "ranks" else torch.enable_grad():
        for index in range(warmup + steps):
            _finish(is_cuda)
            begin = time.perf_counter()
            step()
            _finish(is_cuda)
            if index >= warmup:
                seconds.append(time.perf_counter() - begin)
    expected = one_call(tensors)()
    with torch.no_grad():
        found = [virtual.whole(parts) for parts in virtual.step()]
    apart = [
        ((a.double() - b.double()).abs().max() / b.double().abs().max()).item()
        for a, b in zip(found, expected, strict=True)
    ]
    return {
        "seconds": seconds,
        "apart": max(apart),
        "device": torch.cuda.get_device_name() if is_cuda else None,
    }


def _finish(is_cuda: bool) -> None:
    if is_cuda:
        torch.cuda.synchronize()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--form", choices=FORMS, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    options = parser.parse_args(arguments)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    tensors = inputs(options.size, options.device, dtype)
    print(json.dumps(measure(options.form, tensors, RANKS, options.warmup, options.steps)))


if __name__ == "__main__":
    main()
