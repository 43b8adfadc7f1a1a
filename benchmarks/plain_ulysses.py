"""A plain implementation of DeepSpeed-Ulysses, with one all-to-all per tensor.

There is one all-to-all for each of q, k, v and the output, with a copy to the order of ranks before
it and one back after it. Written from arXiv:2309.14509, section 3, for the benchmark.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

# P ranks; S full sequence, s = S / P; B batch; N heads, n = N / P; D head width


def attend_by_exchange(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """[s, B, N, D] -> [s, B, N, D], by ``attention`` on [S, B, n, D]."""
    if k.shape[2] % dist.get_world_size():
        # The usual solution for too few key-value heads: all of them are repeated.
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    whole = (_Exchange.apply(x, True) for x in (q, k, v))
    return _Exchange.apply(attention(*whole), False)


def _to_sequence(x: Tensor) -> Tensor:
    size = dist.get_world_size()
    part, batch, heads, width = x.shape
    send = x.reshape(part, batch, size, heads // size, width).permute(2, 0, 1, 3, 4).contiguous()
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send)
    return received.reshape(size * part, batch, heads // size, width)


def _to_heads(x: Tensor) -> Tensor:
    size = dist.get_world_size()
    whole, batch, heads, width = x.shape
    send = x.reshape(size, whole // size, batch, heads, width).contiguous()
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send)
    together = received.permute(1, 2, 0, 3, 4).contiguous()
    return together.reshape(whole // size, batch, size * heads, width)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, to_sequence: bool) -> Tensor:
        ctx.to_sequence = to_sequence
        return (_to_sequence if to_sequence else _to_heads)(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return (_to_heads if ctx.to_sequence else _to_sequence)(dy), None
