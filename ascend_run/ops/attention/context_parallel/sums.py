"""Accumulators over the blocks of a ring, for one call of the kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from ascend_run.ops.attention.log_sum_exp import as_column, merge_into
from ascend_run.ops.attention.pieced_attention import with_sinks
from ascend_run.ops.transfer.ring import Packing

from .blocks import Block
from .partitions import Span

# s positions of this rank, B micro-batch (absent in packed layout), N query heads, E width of v


def sum_dtype(like: Tensor) -> torch.dtype:
    """Return the dtype of sums over blocks."""
    return torch.float64 if like.dtype == torch.float64 else torch.float32


class Attended:
    """Output and log-sum-exp of queries [s, B, N, D] over the blocks added so far."""

    def __init__(self, q: Tensor, value_width: int) -> None:
        self._q, self._dtype = q, sum_dtype(q)
        self._out_shape = (*q.shape[:-1], value_width)
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, block: Block, part: Tensor, part_lse: Tensor) -> None:
        """Merge one block; the first block is used as is if it covers all queries."""
        if self._out is None and block.queries == (0, self._q.shape[0]):
            self._out, self._lse = part.to(self._dtype), part_lse.to(self._dtype)
            return
        out, lse = self._sums()
        merge_into(out[block.rows], lse[..., block.rows], part, part_lse)

    def result(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output in the queries' dtype, and the log-sum-exp; sinks [N] are added
        once."""
        out, lse = self._sums()
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks, axis=0)
        return out.to(self._q.dtype), lse

    def _sums(self) -> tuple[Tensor, Tensor]:
        if self._out is None or self._lse is None:
            self._out = self._q.new_zeros(self._out_shape, dtype=self._dtype)
            length, *heads, _ = self._q.shape
            self._lse = self._q.new_full((*heads, length), -torch.inf, dtype=self._dtype)
        return self._out, self._lse


class RowSums:
    """The gradient of the queries; blocks of the same rows share one accumulator."""

    def __init__(self, q: Tensor) -> None:
        self._q = q
        self._parts: dict[Span, Tensor] = {}

    def add(self, block: Block, dq: Tensor) -> None:
        if block.queries in self._parts:
            self._parts[block.queries].add_(dq)
        else:
            self._parts[block.queries] = dq.to(sum_dtype(self._q))

    def result(self) -> Tensor:
        """Return the gradient in the shape and dtype of q."""
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
        """Add the gradients to a received flat buffer, or to a new one of zeros, and return it."""
        if total is None:
            total = self._like.new_zeros(self._packing.numel, dtype=sum_dtype(self._like))
        for block, *gradients in self._parts:
            for sums, gradient in zip(self._packing.views(total), gradients, strict=True):
                sums[block.columns].add_(gradient)
        return total


def sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of sinks [N] that have probability ``exp(sink - lse)`` and no value.

    Covers this rank's queries; it is reduced over ranks like any parameter's gradient.
    """
    dot = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    share = as_column((sinks.to(lse.dtype)[:, None] - lse).exp()).squeeze(-1)
    products = share * dot
    return -products.sum(tuple(range(products.dim() - 1))).to(sinks.dtype)
