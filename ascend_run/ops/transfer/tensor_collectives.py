"""Collectives on whole tensors with their backward, the dimension being one of the tensor's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

# P ranks of the group


def exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[P, ...] -> [P, ...]: entry i goes to rank i, and entry j has come from rank j.

    Its backward is itself. Messages: one all-to-all. Numerics: bitwise.
    """
    return _Exchange.apply(x, group)


def gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """A new dimension of P entries, each rank's tensor in its place; backward: the sum, scattered.

    Messages: one all-gather; one reduce-scatter in backward.
    """
    return _Gather.apply(x, dim, group)


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's entry of a dimension of P entries, summed over the ranks; the dimension goes.

    The backward gathers. Messages: one reduce-scatter; one all-gather in backward.
    """
    return _ReduceScatter.apply(x, dim, group)


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received


def _gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    received = x.new_empty(group.size(), *x.shape)
    # gloo wants the pieces one after the other along the tensor's own first dimension; so below.
    dist.all_gather_into_tensor(received.flatten(0, 1), x.contiguous(), group=group)
    return received.movedim(0, dim)


def _reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    sent = x.movedim(dim, 0).contiguous()
    received = sent.new_empty(sent.shape[1:])
    dist.reduce_scatter_tensor(received, sent.flatten(0, 1), group=group)
    return received


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _exchange(dy, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_scatter(dy, ctx.dim, ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _gather(dy, ctx.dim, ctx.group), None, None
