"""Collectives of rows whose backward is asynchronous, too.

``start`` issues a collective and ``finish`` waits for it; what runs in between is overlapped. In
backward ``finish`` issues the reverse collective and ``start`` waits for it. Autograd runs what was
computed in between, in backward too, in between: its nodes are newer than that of ``start``.
"""

# P ranks of the group, R rows sent, Q rows received

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from ascend_run.ops.autograd_function import Function


class Exchange(ABC):
    """One collective of rows, and its reverse in backward."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.pending: dist.Work | None = None
        self.gradient: Tensor | None = None

    def start(self, rows: Tensor) -> Tensor:
        """Issue the collective of [R, ...]. The result [Q, ...] is only for ``finish``."""
        out: Tensor = _Start.apply(rows, self)
        return out

    def finish(self, rows: Tensor) -> Tensor:
        """Wait for what ``start`` has issued, and return it."""
        out: Tensor = _Finish.apply(rows, self)
        return out

    @abstractmethod
    def issue(self, rows: Tensor, *, back: bool) -> Tensor:
        """Issue one direction, set ``pending``, and return where the rows arrive."""

    def wait(self) -> None:
        """Wait for the direction that was issued last."""
        assert self.pending is not None
        self.pending.wait()
        self.pending = None


class AllToAll(Exchange):
    """Rows to and from each rank; backward: the same the other way.

    Args:
        sent, received: Numbers of rows.
    """

    def __init__(
        self, group: dist.ProcessGroup, sent: Sequence[int], received: Sequence[int]
    ) -> None:
        super().__init__(group)
        self.sent, self.received = list(sent), list(received)

    def issue(self, rows: Tensor, *, back: bool) -> Tensor:
        sent, received = self.sent, self.received
        if back:
            sent, received = received, sent
        arriving = rows.new_empty(sum(received), *rows.shape[1:])
        self.pending = dist.all_to_all_single(
            arriving, rows.contiguous(), received, sent, group=self.group, async_op=True
        )
        return arriving


class AllGather(Exchange):
    """All-gather along the rows, as many from each rank; backward: reduce-scatter."""

    def issue(self, rows: Tensor, *, back: bool) -> Tensor:
        return (self._scatter if back else self._gather)(rows.contiguous())

    def _gather(self, rows: Tensor) -> Tensor:
        arriving = rows.new_empty(rows.shape[0] * self.group.size(), *rows.shape[1:])
        self.pending = dist.all_gather_into_tensor(arriving, rows, group=self.group, async_op=True)
        return arriving

    def _scatter(self, rows: Tensor) -> Tensor:
        arriving = rows.new_empty(rows.shape[0] // self.group.size(), *rows.shape[1:])
        self.pending = dist.reduce_scatter_tensor(arriving, rows, group=self.group, async_op=True)
        return arriving


class ReduceScatter(AllGather):
    """Reduce-scatter along the rows; backward: all-gather."""

    def issue(self, rows: Tensor, *, back: bool) -> Tensor:
        return super().issue(rows, back=not back)


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.issue(rows, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None]:
        exchange: Exchange = ctx.exchange
        exchange.wait()
        gradient, exchange.gradient = exchange.gradient, None
        return gradient, None


class _Finish(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        exchange.wait()
        ctx.exchange = exchange
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dreceived: Tensor) -> tuple[Tensor, None]:
        exchange: Exchange = ctx.exchange
        dreceived = dreceived.contiguous()
        exchange.gradient = exchange.issue(dreceived, back=True)
        return dreceived, None  # kept until it is sent; ``start`` has the gradient


def gather_rows(rows: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """All-gather rows of any number from each rank; backward: reduce-scatter.

    Args:
        sizes: Rows of each rank.
    """
    out: Tensor = _GatherRows.apply(rows, tuple(sizes), group)
    return out


def scatter_rows(rows: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter rows, any number of them to each rank; backward: all-gather."""
    out: Tensor = _ScatterRows.apply(rows, tuple(sizes), group)
    return out


def _gathered(rows: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    arriving = rows.new_empty(sum(sizes), *rows.shape[1:])
    dist.all_gather(list(arriving.split(list(sizes))), rows.contiguous(), group=group)
    return arriving


def _scattered(rows: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    arriving = rows.new_empty(sizes[group.rank()], *rows.shape[1:])
    dist.reduce_scatter(arriving, list(rows.contiguous().split(list(sizes))), group=group)
    return arriving


class _GatherRows(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _gathered(rows, sizes, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor, None, None]:
        return _scattered(drows, ctx.sizes, ctx.group), None, None


class _ScatterRows(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _scattered(rows, sizes, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(drows, ctx.sizes, ctx.group), None, None
