"""Differentiable collectives along a dim of a tensor; a group of one rank calls none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.autograd_function import Function

# P ranks of the group


def exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send entry i of [P, ...] to rank i, and return [P, ...] with entry j received from rank j.

    Its backward is the same all-to-all. Communication: one all-to-all. Numerics: bitwise.
    """
    if group.size() == 1:
        return x
    out: Tensor = _Exchange.apply(x, group)
    return out


def gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """All-gather into a new dim of size P; backward: reduce-scatter.

    Communication: one all-gather; one reduce-scatter in backward.
    """
    if group.size() == 1:
        return x.unsqueeze(dim)
    out: Tensor = _Gather.apply(x, dim, group)
    return out


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter along a dim of size P, which is removed; backward: all-gather.

    Communication: one reduce-scatter; one all-gather in backward.
    """
    if group.size() == 1:
        return x.squeeze(dim)
    out: Tensor = _ReduceScatter.apply(x, dim, group)
    return out


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received


def _gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    received = x.new_empty(group.size(), *x.shape)
    # gloo requires the shards concatenated along the tensor's first dim; so below.
    dist.all_gather_into_tensor(received.flatten(0, 1), x.contiguous(), group=group)
    return received.movedim(0, dim)


def _reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    sent = x.movedim(dim, 0).contiguous()
    received = sent.new_empty(sent.shape[1:])
    dist.reduce_scatter_tensor(received, sent.flatten(0, 1), group=group)
    return received


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _exchange(dy, ctx.group), None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_scatter(dy, ctx.dim, ctx.group), None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _gather(dy, ctx.dim, ctx.group), None, None
