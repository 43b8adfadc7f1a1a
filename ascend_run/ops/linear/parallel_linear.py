"""Megatron's parallel linears as one differentiable function, with configurable matmuls.

A linear has one of four patterns of tensor-parallel collectives, by the sharded dim and whether
sequence parallelism is on. Forward and the gradient of the input are one matmul each, with a
collective before or after it; the gradient of the weight is a matmul of their inputs.

Source: Megatron-LM, arXiv:1909.08053 and arXiv:2205.05198.
"""

# T rows (tokens) on this rank, K inputs, N outputs of this rank's weight [N, K]

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from ascend_run.ops.autograd_function import Function
from ascend_run.types.forward import Forward, ForwardLink, LinkPlace, chain_of

from .plain_matmuls import (
    CollectiveMatmuls,
    Group,
    plain_matmuls,
    start_gather,
    start_reduce_scatter,
)
from .weight_gradient import MatmulAdd, weight_gradient
from .wide_matmul import Matmul


class LinearCollectives(enum.Enum):
    """The collectives of a linear: forward / gradient of the input."""

    NONE = "nothing / nothing"
    COLUMN = "nothing / all-reduce"
    COLUMN_SEQUENCE = "all-gather / reduce-scatter"
    ROW = "all-reduce / nothing"
    ROW_SEQUENCE = "reduce-scatter / all-gather"


ParallelLinearFunction: TypeAlias = Callable[
    [Tensor, Tensor | None, LinearCollectives, Group | None, "LinearImplementation"], Tensor
]
"""A function with the arguments of ``parallel_linear``."""


@attrs.frozen(kw_only=True)
class LinearImplementation:
    """How one linear computes; several plugins may set fields of it."""

    matmul: Matmul = torch.mm
    """The matmul that has no collective."""
    fused: CollectiveMatmuls | None = None
    """Matmuls with a collective; None runs ``matmul`` and the collective one after the other."""
    matmul_add: MatmulAdd | None = None
    """Adds the weight's gradient to its ``main_grad``; None returns it as a separate tensor."""
    keep_gathered: bool = False
    """Save the gathered input of a column-parallel linear for backward; else gather it again."""
    adapted: ParallelLinearFunction | None = None
    """Computes the linear with more than its weight, in place of ``parallel_linear``."""
    weight: Callable[[], Tensor] | None = None
    """Returns the values of a frozen weight that is stored in another form; called in each forward
    and each backward."""
    compute_dtype: torch.dtype | None = None
    """Dtype of the input, the weight and the output of the matmul; None: that of the input."""

    @property
    def matmuls(self) -> CollectiveMatmuls:
        """The matmuls with a collective."""
        return plain_matmuls(self.matmul) if self.fused is None else self.fused

    def values_of(self, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the weight [N, K]; None is given if it is stored in another form."""
        if weight is not None:
            return weight
        assert self.weight is not None
        return self.weight().to(dtype)


def parallel_linear(
    x: Tensor,
    weight_NK: Tensor | None,
    collectives: LinearCollectives,
    group: Group | None,
    implementation: LinearImplementation,
) -> Tensor:
    """Compute [..., K] -> [..., N]; the collective may multiply or divide the leading dim by P.

    Numerics: as Megatron's linear, except for the reduction order.
    """
    out: Tensor = _ParallelLinear.apply(x, weight_NK, collectives, group, implementation)
    return out


class _ParallelLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        collectives: LinearCollectives,
        group: Group | None,
        implementation: LinearImplementation,
    ) -> Tensor:
        rows, matmuls = x.flatten(0, -2), implementation.matmuls
        matrix = implementation.values_of(weight, x.dtype).t()
        kept = rows
        if collectives in (LinearCollectives.NONE, LinearCollectives.COLUMN):
            out = implementation.matmul(rows, matrix)
        else:
            assert group is not None
            if collectives is LinearCollectives.COLUMN_SEQUENCE:
                out, gathered = matmuls.all_gather_matmul(rows, matrix, group)
                kept = gathered if implementation.keep_gathered else rows
            elif collectives is LinearCollectives.ROW_SEQUENCE:
                out = matmuls.matmul_reduce_scatter(rows, matrix, group)
            else:
                out = matmuls.matmul_all_reduce(rows, matrix, group)
        # The parameter itself, because gradient reduction reads its attributes.
        ctx.parameter, ctx.collectives = weight, collectives
        ctx.group, ctx.implementation = group, implementation
        ctx.shape = x.shape
        ctx.save_for_backward(weight, kept if ctx.needs_input_grad[1] else None)
        return out.view(-1, *x.shape[1:-1], matrix.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, x = ctx.saved_tensors
        collectives, group, implementation = ctx.collectives, ctx.group, ctx.implementation
        wants_x, wants_weight, *_ = ctx.needs_input_grad
        weight = implementation.values_of(weight, dy.dtype)
        dy, dx, work, sent = dy.flatten(0, -2), None, None, None
        gather = None
        if (
            wants_weight
            and collectives is LinearCollectives.COLUMN_SEQUENCE
            and not implementation.keep_gathered
        ):
            x, gather = start_gather(x, group)
        if collectives is LinearCollectives.ROW_SEQUENCE:
            dx, dy = implementation.matmuls.all_gather_matmul(dy, weight, group)
        elif not wants_x or collectives in (LinearCollectives.NONE, LinearCollectives.ROW):
            dx = implementation.matmul(dy, weight) if wants_x else None
        elif collectives is LinearCollectives.COLUMN_SEQUENCE:
            if wants_weight:  # its matmul overlaps with the collective
                dx, work, sent = start_reduce_scatter(implementation.matmul(dy, weight), group)
            else:
                dx = implementation.matmuls.matmul_reduce_scatter(dy, weight, group)
        elif wants_weight:
            dx = implementation.matmul(dy, weight)
            work = dist.all_reduce(dx, group=group, async_op=True)
        else:
            dx = implementation.matmuls.matmul_all_reduce(dy, weight, group)
        if gather is not None:
            gather.wait()
        dweight = None
        if wants_weight:
            dweight = weight_gradient(
                ctx.parameter, dy, x, implementation.matmul_add, implementation.matmul
            )
        if work is not None:
            work.wait()
        del sent
        return None if dx is None else dx.view(ctx.shape), dweight, None, None, None


def linear_link(linear: nn.Module, **changes: Any) -> ForwardLink:
    """Return a link that runs Megatron's linear by ``parallel_linear``, with these fields of
    ``LinearImplementation``.

    The link replaces the linear's forward, or updates more fields if another such link is inside.

    Args:
        linear: Megatron's ColumnParallelLinear or RowParallelLinear.

    Raises:
        ValueError: It wraps any other forward, which would be lost.
    """

    def wrap(inner: Forward) -> Forward:
        is_megatrons = getattr(inner, "__func__", None) is type(linear).forward
        if not is_megatrons and not isinstance(inner, LinearForward):
            raise ValueError(
                f"another plugin has already replaced this linear's forward by {inner!r}; enable "
                "only one plugin that replaces it"
            )
        implementation = LinearImplementation() if is_megatrons else inner.implementation
        return _forward_class(linear)(linear, attrs.evolve(implementation, **changes))

    return ForwardLink(wrap=wrap, compilable=False)


def own_forward(linear: nn.Module) -> LinearForward:
    """Return the forward of Megatron's linear with the links that replace it, without those around
    it."""
    chain = chain_of(linear)
    forward: Forward = linear_link(linear).wrap(chain.own)
    for named in chain.links:
        if named.place is LinkPlace.OWN:
            forward = named.link.wrap(forward)
    assert isinstance(forward, LinearForward)
    return forward


def _forward_class(linear: nn.Module) -> type[_ColumnForward] | type[_RowForward]:
    return _RowForward if hasattr(linear, "input_is_parallel") else _ColumnForward


@attrs.frozen(eq=False)
class LinearForward:
    """A forward of Megatron's linear by ``parallel_linear``."""

    linear: Any
    implementation: LinearImplementation

    @property
    def collectives(self) -> LinearCollectives:
        """Those of the linear within a layer."""
        if self.linear.explicit_expert_comm or self.linear.tp_group.size() == 1:
            return LinearCollectives.NONE
        return self._over_ranks()

    def _over_ranks(self) -> LinearCollectives:
        raise NotImplementedError

    def _computed(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        linear, how = self.linear, self.implementation
        wide = x.to(how.compute_dtype or x.dtype)
        own = weight if how.weight is None else None
        out = (how.adapted or parallel_linear)(wide, own, self.collectives, linear.tp_group, how)
        if linear.skip_bias_add or linear.bias is None:
            return out.to(x.dtype), linear.bias if linear.skip_bias_add else None
        return (out + linear.bias).to(x.dtype), None


class _ColumnForward(LinearForward):
    def __call__(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run Megatron's forward for a linear within a layer: its output stays sharded."""
        linear = self.linear
        gathers = linear.gather_output if runtime_gather_output is None else runtime_gather_output
        assert not gathers
        return self._computed(input_, linear.weight if weight is None else weight)

    def _over_ranks(self) -> LinearCollectives:
        if self.linear.sequence_parallel:
            return LinearCollectives.COLUMN_SEQUENCE
        return LinearCollectives.COLUMN if self.linear.allreduce_dgrad else LinearCollectives.NONE


class _RowForward(LinearForward):
    def __call__(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run Megatron's forward for a linear within a layer: its input is already sharded."""
        assert self.linear.input_is_parallel
        return self._computed(input_, self.linear.weight)

    def _over_ranks(self) -> LinearCollectives:
        is_sequence = self.linear.sequence_parallel
        return LinearCollectives.ROW_SEQUENCE if is_sequence else LinearCollectives.ROW
