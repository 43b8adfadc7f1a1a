"""A tensor-parallel linear together with its low-rank adapter, as one differentiable function.

The collectives of the adapter carry its rank per token. Each is launched before a matmul with the
weight and awaited after it; those of the full width are sent in slices, each of which overlaps with
the matmul of another. The gradient of a row-parallel output is gathered once, for the weight and
for the adapter: gather(dy B) = gather(dy) B.

Source: the schedule of MindSpeed-LLM's CCLoRA; slices as in ``sliced_matmul``.
"""

# T rows (tokens) on this rank, K inputs, N outputs of this rank's weight [N, K], R rank of the
# adapter

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import attrs
import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from ascend_run.ops.autograd_function import Function

from .parallel_linear import LinearCollectives
from .plain_matmuls import Group
from .sliced_matmul import GatheredRows, PendingSum, begin_all_reduce, begin_reduce_scatter
from .wide_matmul import Matmul

_COLUMN: Final = (LinearCollectives.COLUMN, LinearCollectives.COLUMN_SEQUENCE)
_SEQUENCE: Final = (LinearCollectives.COLUMN_SEQUENCE, LinearCollectives.ROW_SEQUENCE)


@attrs.frozen
class Weights:
    """The weight of a linear and the matrices of its adapter."""

    frozen_NK: Tensor
    a_RK: Tensor
    b_RN: Tensor
    """With the adapter's scale."""


@attrs.frozen(kw_only=True)
class Schedule:
    """How a linear and its adapter compute and communicate."""

    collectives: LinearCollectives
    """Of the linear."""
    group: Group
    """The tensor-parallel group."""
    matmul: Matmul = torch.mm
    slices: int = 2
    """Slices of the rows in which a collective of the full width is sent."""
    merges: bool = False
    """Add the adapter to the weight, and multiply once."""

    @property
    def is_column(self) -> bool:
        return self.collectives in _COLUMN

    @property
    def is_sequence(self) -> bool:
        """Whether rows outside of the linear are sharded over the ranks."""
        return self.collectives in _SEQUENCE

    def matrix(self, weights: Weights) -> Tensor:
        """Return what multiplies the input: the weight, or the weight with the adapter."""
        if not self.merges:
            return weights.frozen_NK
        return weights.frozen_NK + self.matmul(weights.b_RN.t(), weights.a_RK)

    def begin_sum(self, x: Tensor) -> PendingSum:
        """Begin to sum over ranks; each gets its rows if they are sharded."""
        if self.collectives is LinearCollectives.NONE:
            return PendingSum(x, [])
        if not self.is_sequence:
            return PendingSum(x, [dist.all_reduce(x, group=self.group, async_op=True)])
        own = x.new_empty(x.shape[0] // self.group.size(), x.shape[1])
        work = dist.reduce_scatter_tensor(own, x, group=self.group, async_op=True)
        return PendingSum(own, [work], [x])

    def begin_summed_matmul(self, x: Tensor, matrix: Tensor) -> PendingSum:
        """Multiply, and begin to sum as ``begin_sum`` does, in slices."""
        if self.collectives is LinearCollectives.NONE:
            return PendingSum(self.matmul(x, matrix), [])
        begin = begin_reduce_scatter if self.is_sequence else begin_all_reduce
        return begin(x, matrix, self.group, self.slices, self.matmul)

    def begin_gather(self, x: Tensor) -> PendingSum:
        """Begin to gather all ranks' rows if they are sharded."""
        if not self.is_sequence:
            return PendingSum(x, [])
        rows = x.new_empty(self.group.size() * x.shape[0], x.shape[1])
        work = dist.all_gather_into_tensor(rows, x, group=self.group, async_op=True)
        return PendingSum(rows, [work], [x])

    def begin_narrow(self, narrow: Tensor, rows: int) -> PendingSum:
        """Begin to gather what forward kept of the output of A, unless it is of all rows."""
        return PendingSum(narrow, []) if narrow.shape[0] == rows else self.begin_gather(narrow)


def adapted_linear(
    x: Tensor,
    make_weight_NK: Callable[[], Tensor],
    a_RK: Tensor,
    make_b_RN: Callable[[], Tensor],
    schedule: Schedule,
    *,
    adapter_x: Tensor | None = None,
) -> Tensor:
    """Compute ``x @ weight.T + adapter_x @ A.T @ B``, [..., K] -> [..., N]; the collective may
    multiply or divide the leading dim by the number of ranks.

    Column-parallel: A is replicated, B sharded as the output is. Row-parallel: A is sharded as the
    input is, B replicated. Under sequence parallelism the gradient of the replicated one covers
    this rank's tokens.

    Numerics: as linear and adapter apart, except for the reduction order; with ``merges`` the
    weight with the adapter is rounded to the weight's dtype.

    Args:
        make_weight_NK: Returns the weight, which is frozen: a parameter, or values of one that is
            stored in another form. It is called again in backward, so that they are not saved.
        make_b_RN: Makes B, with the adapter's scale, of parameters; again in backward, likewise.
        adapter_x: What the adapter reads instead of x (x after dropout).

    Raises:
        ValueError: The weight requires a gradient, or ``merges`` with an input of the adapter's
            own.
    """
    if schedule.merges and adapter_x is not None:
        raise ValueError("an adapter that reads another input cannot be merged into the weight")
    b_RN = make_b_RN()
    makers = make_weight_NK, make_b_RN
    out: Tensor = _AdaptedLinear.apply(x, adapter_x, a_RK, b_RN, makers, schedule)
    return out


def frozen(weight_NK: Tensor, name: str) -> Tensor:
    """Return a weight that is frozen.

    Raises:
        ValueError: It requires a gradient.
    """
    if weight_NK.requires_grad:
        raise ValueError(f"the weight of {name} is frozen; this one requires a gradient")
    return weight_NK


class _AdaptedLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        adapter_x: Tensor | None,
        a: Tensor,
        b: Tensor,
        makers: tuple[Callable[[], Tensor], Callable[[], Tensor]],
        how: Schedule,
    ) -> Tensor:
        rows = x.flatten(0, -2)
        read = rows if adapter_x is None else adapter_x.flatten(0, -2)
        run = column_forward if how.is_column else row_forward
        make_weight, _ = makers
        weights = Weights(frozen(make_weight(), "an adapted linear"), a, b)
        out, narrow = run(rows, read, weights, how)
        ctx.shape, ctx.how, ctx.is_same, ctx.makers = x.shape, how, adapter_x is None, makers
        ctx.save_for_backward(read, narrow, a)
        return out.view(-1, *x.shape[1:-1], out.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        read, narrow, a = ctx.saved_tensors
        make_weight, make_b = ctx.makers
        weights = Weights(make_weight(), a, make_b())  # without a graph, as in any backward
        run = column_backward if ctx.how.is_column else row_backward
        rows = dy.flatten(0, -2)
        found = run(rows, read, ctx.how.begin_narrow(narrow, len(rows)), weights, ctx.how)
        dx, apart = found.dx, found.dadapter_x
        if ctx.is_same and apart is not None:
            dx, apart = dx.add_(apart), None
        apart = None if apart is None else apart.view(ctx.shape)
        return dx.view(ctx.shape), apart, found.da, found.db, None, None


@attrs.frozen
class Gradients:
    """Of one linear and its adapter."""

    dx: Tensor
    """[T, K]; with ``merges`` also through the adapter."""
    dadapter_x: Tensor | None
    """[T, K] through the adapter; None with ``merges``."""
    da: Tensor
    db: Tensor


def column_forward(
    x: Tensor, adapter_x: Tensor, weights: Weights, how: Schedule
) -> tuple[Tensor, Tensor]:
    """Return the output, and the output of A that backward reads: of all rows if they were
    gathered, else of this rank's."""
    if not how.is_sequence:
        narrow = how.matmul(adapter_x, weights.a_RK.t())
        out = how.matmul(x, how.matrix(weights).t())
        return (out if how.merges else out.addmm_(narrow, weights.b_RN)), narrow
    rows = GatheredRows(x, how.group, how.slices)
    narrow = how.matmul(adapter_x, weights.a_RK.t())
    if how.merges:
        return rows.times(how.matrix(weights).t(), how.matmul)[0], narrow
    gathered = how.begin_gather(narrow)
    out, _ = rows.times(weights.frozen_NK.t(), how.matmul)
    narrow = gathered.wait()
    return out.addmm_(narrow, weights.b_RN), narrow


def column_backward(
    dy: Tensor, adapter_x: Tensor, narrow: PendingSum, weights: Weights, how: Schedule
) -> Gradients:
    """Return the gradients. The adapter's collectives overlap with the matmul with the weight, and
    its matmuls with the sum of that.

    Args:
        narrow: The output of A, from ``Schedule.begin_narrow``; of ``row_backward`` too.
    """
    summed = how.begin_sum(how.matmul(dy, weights.b_RN.t()))
    dx = how.begin_summed_matmul(dy, how.matrix(weights))
    db = how.matmul(narrow.wait().t(), dy)
    dnarrow = summed.wait()
    da = how.matmul(dnarrow.t(), adapter_x)
    dadapter_x = None if how.merges else how.matmul(dnarrow, weights.a_RK)
    return Gradients(dx.wait(), dadapter_x, da, db)


def row_forward(
    x: Tensor, adapter_x: Tensor, weights: Weights, how: Schedule
) -> tuple[Tensor, Tensor]:
    """Return the output, and the output of A summed over ranks, of this rank's rows."""
    summed = how.begin_sum(how.matmul(adapter_x, weights.a_RK.t()))
    out = how.begin_summed_matmul(x, how.matrix(weights).t())
    narrow = summed.wait()
    if how.merges:
        return out.wait(), narrow
    added = how.matmul(narrow, weights.b_RN)
    return out.wait().add_(added), narrow


def row_backward(
    dy: Tensor, adapter_x: Tensor, narrow: PendingSum, weights: Weights, how: Schedule
) -> Gradients:
    """Return the gradients. One gather of dy serves the weight and the adapter."""
    rows = GatheredRows(dy, how.group, how.slices) if how.is_sequence else None
    matrix = how.matrix(weights)
    db = how.matmul(narrow.wait().t(), dy)
    if rows is None:
        dx = how.matmul(dy, matrix)
    else:
        dx, dy = rows.times(matrix, how.matmul)
    dnarrow = how.matmul(dy, weights.b_RN.t())
    da = how.matmul(dnarrow.t(), adapter_x)
    dadapter_x = None if how.merges else how.matmul(dnarrow, weights.a_RK)
    return Gradients(dx, dadapter_x, da, db)
