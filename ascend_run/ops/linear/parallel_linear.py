"""Megatron's parallel linears as one differentiable function, with products and sums to choose.

A linear meets its tensor-parallel group in one of four ways, by what is split and whether the
sequence is split too. Forward and the gradient of the input are one product each, with a collective
before or after it; the gradient of the weight is a product of what both had before them.

Source: Megatron-LM, arXiv:1909.08053 and arXiv:2205.05198.
"""

# T rows (tokens) on this rank, K inputs, N outputs of this rank's weight [N, K]

from __future__ import annotations

import enum
from collections.abc import Callable
from types import MethodType
from typing import Any, Final, TypeAlias

import attrs
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from .weight_gradient import MatmulAdd, weight_gradient

Group: TypeAlias = dist.ProcessGroup


class Exchange(enum.Enum):
    """How a linear meets its group: forward / gradient of the input."""

    NONE = "nothing / nothing"
    COLUMN = "nothing / all-reduce"
    COLUMN_SEQUENCE = "all-gather / reduce-scatter"
    ROW = "all-reduce / nothing"
    ROW_SEQUENCE = "reduce-scatter / all-gather"


@attrs.frozen(kw_only=True)
class Products:
    """Products with their collective: ``(rows, matrix [in, out], group)``."""

    all_gather_matmul: Callable[[Tensor, Tensor, Group], tuple[Tensor, Tensor]]
    """The product of all ranks' rows, and those rows."""
    matmul_reduce_scatter: Callable[[Tensor, Tensor, Group], Tensor]
    """This rank's rows of the sum of all ranks' products."""
    matmul_all_reduce: Callable[[Tensor, Tensor, Group], Tensor]


def _all_gather_matmul(x: Tensor, matrix: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    gathered, work = _start_gather(x, group)
    work.wait()
    return gathered @ matrix, gathered


def _matmul_reduce_scatter(x: Tensor, matrix: Tensor, group: Group) -> Tensor:
    out, work, _ = _start_reduce_scatter(x @ matrix, group)
    work.wait()
    return out


def _matmul_all_reduce(x: Tensor, matrix: Tensor, group: Group) -> Tensor:
    product = x @ matrix
    dist.all_reduce(product, group=group)
    return product


PLAIN: Final = Products(
    all_gather_matmul=_all_gather_matmul,
    matmul_reduce_scatter=_matmul_reduce_scatter,
    matmul_all_reduce=_matmul_all_reduce,
)
"""Collective and product one after the other, as Megatron has them."""


def _start_gather(x: Tensor, group: Group) -> tuple[Tensor, dist.Work]:
    gathered = x.new_empty(group.size() * x.shape[0], x.shape[1])
    work = dist.all_gather_into_tensor(gathered, x.contiguous(), group=group, async_op=True)
    return gathered, work


def _start_reduce_scatter(x: Tensor, group: Group) -> tuple[Tensor, dist.Work, Tensor]:
    """The last is what is sent, which must stay until then."""
    out = x.new_empty(x.shape[0] // group.size(), x.shape[1])
    return out, dist.reduce_scatter_tensor(out, x, group=group, async_op=True), x


@attrs.define(kw_only=True)
class Way:
    """How one linear computes; what several plugins say of it stands together."""

    products: Products = PLAIN
    matmul_add: MatmulAdd | None = None
    """Adds the weight's gradient to its ``main_grad``; None leaves it a tensor of its own."""
    keep_gathered: bool = False
    """Keep the gathered input of a column-parallel linear for backward; else gather it again."""


def parallel_linear(
    x: Tensor, weight_NK: Tensor, exchange: Exchange, group: Group | None, way: Way
) -> Tensor:
    """[..., K] -> [..., N], the leading axes P times or 1 / P as long where the exchange says so.

    Numerics: those of Megatron's linear but for the order of sums.
    """
    return _ParallelLinear.apply(x, weight_NK, exchange, group, way)


class _ParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, exchange: Exchange, group: Any, way: Way
    ) -> Tensor:
        rows, matrix, products = x.flatten(0, -2), weight.t(), way.products
        kept = rows
        if exchange is Exchange.COLUMN_SEQUENCE:
            out, gathered = products.all_gather_matmul(rows, matrix, group)
            kept = gathered if way.keep_gathered else rows
        elif exchange is Exchange.ROW_SEQUENCE:
            out = products.matmul_reduce_scatter(rows, matrix, group)
        elif exchange is Exchange.ROW:
            out = products.matmul_all_reduce(rows, matrix, group)
        else:
            out = rows @ matrix
        # The parameter itself, since who reduces gradients talks to it by its attributes.
        ctx.parameter, ctx.exchange, ctx.group, ctx.way = weight, exchange, group, way
        ctx.shape = x.shape
        ctx.save_for_backward(weight, kept if ctx.needs_input_grad[1] else None)
        return out.view(-1, *x.shape[1:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, x = ctx.saved_tensors
        exchange, group, way = ctx.exchange, ctx.group, ctx.way
        wants_x, wants_weight, *_ = ctx.needs_input_grad
        dy, dx, work, sent = dy.flatten(0, -2), None, None, None
        gather = None
        if wants_weight and exchange is Exchange.COLUMN_SEQUENCE and not way.keep_gathered:
            x, gather = _start_gather(x, group)
        if exchange is Exchange.ROW_SEQUENCE:
            dx, dy = way.products.all_gather_matmul(dy, weight, group)
        elif not wants_x or exchange in (Exchange.NONE, Exchange.ROW):
            dx = dy @ weight if wants_x else None
        elif exchange is Exchange.COLUMN_SEQUENCE:
            if wants_weight:  # whose product hides the message
                dx, work, sent = _start_reduce_scatter(dy @ weight, group)
            else:
                dx = way.products.matmul_reduce_scatter(dy, weight, group)
        elif wants_weight:
            dx = dy @ weight
            work = dist.all_reduce(dx, group=group, async_op=True)
        else:
            dx = way.products.matmul_all_reduce(dy, weight, group)
        if gather is not None:
            gather.wait()
        dweight = None
        if wants_weight:
            dweight = weight_gradient(ctx.parameter, dy, x, way.matmul_add)
        if work is not None:
            work.wait()
        del sent
        return None if dx is None else dx.view(ctx.shape), dweight, None, None, None


_WAY: Final = "_ascend_way"


def change_way(linear: nn.Module, **changes: Any) -> nn.Module:
    """Let Megatron's linear compute by ``parallel_linear``, with these fields of its ``Way``.

    The same module, parameters and names; done again it changes more fields.

    Args:
        linear: Megatron's ColumnParallelLinear or RowParallelLinear.

    Raises:
        ValueError: Somebody has given it another forward, which would be lost.
    """
    way: Way | None = getattr(linear, _WAY, None)
    if way is None:
        if "forward" in vars(linear):
            raise ValueError(
                "this linear has another plugin's forward already; let that plugin's manifest say "
                "after=(...) of the one that changes how linears compute"
            )
        way = Way()
        setattr(linear, _WAY, way)
        is_row = hasattr(linear, "input_is_parallel")
        linear.forward = MethodType(_row_forward if is_row else _column_forward, linear)
    for name, value in changes.items():
        setattr(way, name, value)
    return linear


def _column_forward(
    self: Any, x: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
) -> tuple[Tensor, Tensor | None]:
    """As Megatron's, of a layer's linear: its output stays split."""
    assert not (self.gather_output if runtime_gather_output is None else runtime_gather_output)
    weight = self.weight if weight is None else weight
    if self.explicit_expert_comm or self.tp_group.size() == 1:
        exchange = Exchange.NONE
    elif self.sequence_parallel:
        exchange = Exchange.COLUMN_SEQUENCE
    else:
        exchange = Exchange.COLUMN if self.allreduce_dgrad else Exchange.NONE
    return _with_bias(self, parallel_linear(x, weight, exchange, self.tp_group, _way_of(self)))


def _row_forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """As Megatron's, of a layer's linear: its input is split already."""
    assert self.input_is_parallel
    if self.explicit_expert_comm or self.tp_group.size() == 1:
        exchange = Exchange.NONE
    else:
        exchange = Exchange.ROW_SEQUENCE if self.sequence_parallel else Exchange.ROW
    return _with_bias(self, parallel_linear(x, self.weight, exchange, self.tp_group, _way_of(self)))


def _way_of(linear: Any) -> Way:
    way: Way = getattr(linear, _WAY)
    return way


def _with_bias(linear: Any, out: Tensor) -> tuple[Tensor, Tensor | None]:
    if linear.skip_bias_add or linear.bias is None:
        return out, linear.bias if linear.skip_bias_add else None
    return out + linear.bias, None
