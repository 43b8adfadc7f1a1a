"""Sums over the blocks of a ring, for one call of the kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from ascend_run.ops.attention.log_sum_exp import as_column, merge_into
from ascend_run.ops.transfer.ring import Packing

from .blocks import Block
from .cut import Span

# s positions of this rank, B micro-batch (absent in packed layout), N query heads, E width of v


def sum_dtype(like: Tensor) -> torch.dtype:
    """What sums over blocks are taken in."""
    return torch.float64 if like.dtype == torch.float64 else torch.float32


class Attended:
    """Output and log-sum-exp of queries [s, B, N, D] over all blocks so far."""

    def __init__(self, q: Tensor, value_width: int) -> None:
        self._q, self._dtype = q, sum_dtype(q)
        self._out_shape = (*q.shape[:-1], value_width)
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, block: Block, part: Tensor, part_lse: Tensor) -> None:
        """Merge one block; where it is the first and of all queries, it is taken as it is."""
        if self._out is None and block.queries == (0, self._q.shape[0]):
            self._out, self._lse = part.to(self._dtype), part_lse.to(self._dtype)
            return
        out, lse = self._sums()
        merge_into(out[block.rows], lse[..., block.rows], part, part_lse)

    def result(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Output in the queries' dtype, and log-sum-exp; each sink [N] counted once."""
        out, lse = self._sums()
        if sinks is not None:
            with_sink = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            out = out * as_column((lse - with_sink).exp())
            lse = with_sink
        return out.to(self._q.dtype), lse

    def _sums(self) -> tuple[Tensor, Tensor]:
        if self._out is None or self._lse is None:
            self._out = self._q.new_zeros(self._out_shape, dtype=self._dtype)
            length, *heads, _ = self._q.shape
            self._lse = self._q.new_full((*heads, length), -torch.inf, dtype=self._dtype)
        return self._out, self._lse


class RowSums:
    """The gradient of the queries; blocks of the same rows are summed at once."""

    def __init__(self, q: Tensor) -> None:
        self._q = q
        self._parts: dict[Span, Tensor] = {}

    def add(self, block: Block, dq: Tensor) -> None:
        if block.queries in self._parts:
            self._parts[block.queries].add_(dq)
        else:
            self._parts[block.queries] = dq.to(sum_dtype(self._q))

    def result(self) -> Tensor:
        """In the shape and dtype of q."""
        whole = self._parts.pop((0, self._q.shape[0]), None)
        if whole is None:
            whole = torch.zeros_like(self._q, dtype=sum_dtype(self._q))
        for rows, part in self._parts.items():
            whole[slice(*rows)].add_(part)
        return whole.to(self._q.dtype)


class KeySums:
    """The gradients of the keys and values that a rank holds at one step."""

    def __init__(self, packing: Packing, like: Tensor) -> None:
        self._packing, self._like = packing, like
        self._parts: list[tuple[Block, Tensor, Tensor]] = []

    def add(self, block: Block, dk: Tensor, dv: Tensor) -> None:
        self._parts.append((block, dk, dv))

    def onto(self, total: Tensor | None) -> Tensor:
        """Added to the flat buffer that came from the ranks before, or to a new one of zeros."""
        if total is None:
            total = self._like.new_zeros(self._packing.numel, dtype=sum_dtype(self._like))
        for block, *gradients in self._parts:
            for sums, gradient in zip(self._packing.views(total), gradients, strict=True):
                sums[block.columns].add_(gradient)
        return total


def sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """[N]: a sink takes ``exp(sink - lse)`` and gives no value, so it only lowers the others.

    Of this rank's queries; the ranks' shares are summed as any parameter's are.
    """
    dot = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    share = as_column((sinks.to(lse.dtype)[:, None] - lse).exp()).squeeze(-1)
    products = share * dot
    return -products.sum(tuple(range(products.dim() - 1))).to(sinks.dtype)
