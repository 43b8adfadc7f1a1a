"""Causal attention by recursive halving, for kernels that compute full blocks on the diagonal.

Such a kernel computes twice the visible pairs of a short causal square. The visible half splits
into a full square below two causal squares of half the size, and so on down to ``SMALLEST``. The
squares of one size are evenly spaced, so one call batches all of a document's, on strided views.
"""

# S positions, B batch, N query heads, D width of q and k, E width of v; H query or key-value heads
# of the whole batch; C blocks of L positions

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import attrs
from torch import Tensor
from torch.nn import functional as F

from ascend_run.types.attention import Mask

from . import pieced_attention
from .log_sum_exp import merge_into
from .pieced_attention import FusedKernel
from .visibility import HALVED_FROM, Rectangle, Shape, rectangles

SMALLEST: Final = HALVED_FROM // 2
"""Positions of the smallest causal squares; the kernel's matmuls are slow on smaller ones."""


def forward(
    kernel: FusedKernel, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute ``pieced_attention.forward`` on [B, N, S, D], by halving where that costs less.

    Numerics: equal to one call up to rounding; a document's result is bitwise independent of its
    position.
    """
    documents = _halved_documents(q, k, mask)
    if not documents:
        return pieced_attention.forward(kernel, q, k, v, mask, scale)
    heads, width = q.shape[:2], v.shape[-1]
    q, k, v = (x.flatten(0, 1) for x in pieced_attention.one_width(q, k, v))
    out, lse = _empty(q), q.new_empty(q.shape[:2])
    for square in _squares(documents):
        queries, keys = square.queries, square.keys
        tensors = queries.of(q), keys.of(k), keys.of(v)
        more = kernel.forward(*tensors, square.rectangle, scale)
        targets = queries.of(out), queries.of(lse)
        if square.is_first:
            for target, x in zip(targets, more, strict=True):
                target.copy_(x)
        else:
            (out_CHLD, lse_CHL), (more_CHLD, more_CHL) = targets, more
            merge_into(out_CHLD.movedim(2, 0), lse_CHL, more_CHLD.movedim(2, 0), more_CHL)
    return out.unflatten(0, heads)[..., :width], lse.unflatten(0, heads)


def backward(
    kernel: FusedKernel,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Mask,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``pieced_attention.backward``, by halving where ``forward`` does."""
    documents = _halved_documents(q, k, mask)
    if not documents:
        return pieced_attention.backward(kernel, dout, q, k, v, out, lse, mask, scale)
    heads, groups, q_width, v_width = q.shape[:2], k.shape[:2], q.shape[-1], v.shape[-1]
    q, k, v = (x.flatten(0, 1) for x in pieced_attention.one_width(q, k, v))
    dout, out, lse = (x.flatten(0, 1) for x in (dout, out, lse))
    if q.shape[-1] > v_width:
        dout, out = (F.pad(x, (0, q.shape[-1] - v_width)) for x in (dout, out))
    dq, dk, dv = (_empty(x) for x in (q, k, v))
    for square in _squares(documents):
        queries, keys = square.queries, square.keys
        gradients = kernel.backward(
            queries.of(dout),
            queries.of(q),
            keys.of(k),
            keys.of(v),
            queries.of(out),
            queries.of(lse).contiguous(),
            square.rectangle,
            scale,
        )
        targets = queries.of(dq), keys.of(dk), keys.of(dv)
        for target, x in zip(targets, gradients, strict=True):
            target.copy_(x) if square.is_first else target.add_(x)
    return (
        dq.unflatten(0, heads)[..., :q_width],
        dk.unflatten(0, groups)[..., :q_width],
        dv.unflatten(0, groups)[..., :v_width],
    )


@attrs.frozen
class _Blocks:
    """Evenly spaced runs of positions of equal length."""

    start: int
    length: int
    count: int = 1
    step: int = 1

    def of(self, x: Tensor) -> Tensor:
        """View [H, S, D] as [C, H, L, D], or [H, S] as [C, H, L]."""
        across, along, *widths = x.stride()
        return x.as_strided(
            (self.count, x.shape[0], self.length, *x.shape[2:]),
            (self.step * along, across, along, *widths),
            x.storage_offset() + self.start * along,
        )


@attrs.frozen
class _Squares:
    """Queries and keys of one kernel call."""

    queries: _Blocks
    keys: _Blocks

    @property
    def is_first(self) -> bool:
        """Whether no earlier call covers these queries or keys: these are the causal squares."""
        return self.queries == self.keys

    @property
    def rectangle(self) -> Rectangle:
        """The rectangle of one square."""
        shape = Shape.CAUSAL if self.is_first else Shape.FULL
        return Rectangle(0, self.queries.length, 0, self.keys.length, shape)


def _halved_documents(q: Tensor, k: Tensor, mask: Mask) -> list[tuple[int, int]]:
    """Return (start, end) of each document if the mask leaves only consecutive causal squares.

    Empty if anything else is visible, if all documents are short, or for dtypes under 4 bytes,
    whose partial results would lose precision when merged.
    """
    length = q.shape[2]
    parts = rectangles(mask, length, k.shape[2])
    causal = (part.shape is Shape.CAUSAL or part.num_queries == 1 for part in parts)
    in_turn = sum(part.num_queries for part in parts) == length
    squares = in_turn and all(part.queries == part.keys for part in parts) and all(causal)
    longest = max((part.num_queries for part in parts), default=0)
    if not squares or longest < HALVED_FROM or q.itemsize < 4:
        return []
    return [(part.query_start, part.query_end) for part in parts]


def _squares(documents: list[tuple[int, int]]) -> Iterator[_Squares]:
    """Yield each document's causal squares, then the full ones by increasing size; the last square
    of a size may have fewer queries."""
    for start, end in documents:
        length = end - start
        size = SMALLEST if length >= 2 * SMALLEST else length
        if count := length // size:
            blocks = _Blocks(start, size, count, size)
            yield _Squares(blocks, blocks)
        if rest := length % size:
            blocks = _Blocks(end - rest, rest)
            yield _Squares(blocks, blocks)
        while size < length:
            count, rest = divmod(length, 2 * size)
            if count:
                keys = _Blocks(start, size, count, 2 * size)
                yield _Squares(attrs.evolve(keys, start=start + size), keys)
            if rest > size:
                keys = _Blocks(end - rest, size)
                yield _Squares(_Blocks(end - rest + size, rest - size), keys)
            size *= 2


def _empty(x_HSD: Tensor) -> Tensor:
    """Allocate a tensor of the same shape, stored as [S, H, D]."""
    return x_HSD.new_empty((x_HSD.shape[1], x_HSD.shape[0], x_HSD.shape[2])).transpose(0, 1)
