"""Attention by a device's fused kernel, one call per visible rectangle of the mask.

Fused kernels support few mask shapes; ``visibility`` splits any mask into those. Backward uses the
output and the log-sum-exp it is given, so a caller that merged several attentions (a ring) passes
the merged ones.
"""

# S queries, J keys, B batch, N query heads, G key-value heads, D width of q and k, E width of v;
# the sequence is at the kernel's own dim: [S, B, N, D] or [B, N, S, D]

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ascend_run.types.attention import Mask

from .log_sum_exp import as_column
from .visibility import Rectangle, rectangles


class FusedKernel(Protocol):
    """Attention of one rectangle on one device. q, k and v have the same width."""

    @property
    def sequence_axis(self) -> int:
        """Dim of the sequence in q, k, v and out: 0 or 2. The log-sum-exp is always [B, N, S]."""
        ...

    @property
    def band_block(self) -> int | None:
        """Maximum number of queries of a banded rectangle; None if bands are cheap."""
        ...

    def cut(self, part: Rectangle) -> Sequence[Rectangle]:
        """Split a rectangle into ones the kernel supports; each query stays in exactly one of
        them."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, part: Rectangle, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return (out, log-sum-exp) of tensors sliced to ``part``, whose indices are those before
        slicing."""
        ...

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        part: Rectangle,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) of one rectangle, whose queries may see more keys outside of it."""
        ...


def forward(
    kernel: FusedKernel, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output in q's dtype with v's width, and the log-sum-exp in float32 (float64).

    A query that sees no key has zeros as output and -inf as log-sum-exp.
    """
    axis = kernel.sequence_axis
    parts = _parts(kernel, mask, q.shape[axis], k.shape[axis])
    width = v.shape[-1]
    q, k, v = one_width(q, k, v)
    if _covers_all(parts, q.shape[axis], k.shape[axis]):
        out, lse = kernel.forward(q, k, v, parts[0], scale)
        return out[..., :width], lse
    covered = _consecutive([part.queries for part in parts], q.shape[axis])
    out = _empty_output(q, width, axis)
    heads = (q.shape[1:3]) if axis == 0 else q.shape[:2]
    lse = q.new_empty((*heads, q.shape[axis]), dtype=_wide(q.dtype))
    if not covered:
        out.zero_()
        lse.fill_(-torch.inf)
    for part in parts:
        keys = (_slice(k, part.keys, axis), _slice(v, part.keys, axis))
        part_out, part_lse = kernel.forward(_slice(q, part.queries, axis), *keys, part, scale)
        _slice(out, part.queries, axis).copy_(part_out[..., :width])
        lse[:, :, part.queries] = part_lse
    return out, lse


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
    """Return gradients of q, k and v in their dtypes; sums over rectangles are at least float32."""
    axis, dtype = kernel.sequence_axis, q.dtype
    parts = _parts(kernel, mask, q.shape[axis], k.shape[axis])
    q_width, v_width = q.shape[-1], v.shape[-1]
    q, k, v = one_width(q, k, v)
    if q.shape[-1] > v_width:
        dout, out = (F.pad(t, (0, q.shape[-1] - v_width)) for t in (dout, out))
    if _covers_all(parts, q.shape[axis], k.shape[axis]):
        dq, dk, dv = kernel.backward(dout, q, k, v, out, lse, parts[0], scale)
        return dq[..., :q_width], dk[..., :q_width], dv[..., :v_width]
    dq = torch.empty_like(q)
    if not _consecutive([part.queries for part in parts], q.shape[axis]):
        dq.zero_()
    # Several rectangles may share keys; their gradients are accumulated.
    alone = _consecutive([part.keys for part in parts], k.shape[axis])
    if alone:
        dk, dv = torch.empty_like(k), torch.empty_like(v)
    else:
        dk, dv = (torch.zeros_like(t, dtype=_wide(dtype)) for t in (k, v))
    for part in parts:
        dout_rows, q_rows, out_rows = (_slice(t, part.queries, axis) for t in (dout, q, out))
        keys = (_slice(k, part.keys, axis), _slice(v, part.keys, axis))
        part_dq, part_dk, part_dv = kernel.backward(
            dout_rows,
            q_rows,
            *keys,
            out_rows,
            lse[:, :, part.queries].contiguous(),
            part,
            scale,
        )
        _slice(dq, part.queries, axis).copy_(part_dq)
        for sums, gradient in ((dk, part_dk), (dv, part_dv)):
            target = _slice(sums, part.keys, axis)
            target.copy_(gradient) if alone else target.add_(gradient)
    return dq[..., :q_width], dk[..., :q_width].to(dtype), dv[..., :v_width].to(dtype)


def with_sinks(out: Tensor, lse: Tensor, sinks_N: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Add one logit a head, without a value, to the softmax's denominator."""
    with_sink = torch.logaddexp(lse, sinks_N.to(lse.dtype)[:, None])
    share = _rows_of(torch.exp(lse - with_sink), axis)
    return (out * share).to(out.dtype), with_sink


def sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks_N: Tensor, axis: int) -> Tensor:
    """Return the gradient of the sinks [N]; a sink has probability ``exp(sink - lse)`` and no
    value."""
    dot = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    dot_BNS = dot if axis == 2 else dot.permute(1, 2, 0)
    probability_BNS = (sinks_N.to(lse.dtype)[:, None] - lse).exp()
    return -(probability_BNS * dot_BNS).sum((0, 2)).to(sinks_N.dtype)


def one_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad q and k, or v, with zeros to one width, as fused kernels require.

    Zeros in q and k do not change the scores; zeros in v add zero columns to the output.
    """
    difference = q.shape[-1] - v.shape[-1]
    if difference > 0:
        return q, k, F.pad(v, (0, difference))
    if difference < 0:
        return F.pad(q, (0, -difference)), F.pad(k, (0, -difference)), v
    return q, k, v


def _parts(
    kernel: FusedKernel, mask: Mask, num_queries: int, num_keys: int
) -> tuple[Rectangle, ...]:
    whole = rectangles(mask, num_queries, num_keys, band_block=kernel.band_block)
    return tuple(piece for part in whole for piece in kernel.cut(part))


def _covers_all(parts: Sequence[Rectangle], num_queries: int, num_keys: int) -> bool:
    """Return whether one rectangle covers the full score matrix."""
    if len(parts) != 1:
        return False
    (part,) = parts
    return part.queries == slice(0, num_queries) and part.keys == slice(0, num_keys)


def _consecutive(runs: Sequence[slice], length: int) -> bool:
    """Return whether the ranges are consecutive and cover ``length``, as documents do."""
    starts = [0, *(run.stop for run in runs)]
    return starts[-1] == length and all(
        run.start == start for run, start in zip(runs, starts, strict=False)
    )


def _empty_output(q: Tensor, width: int, axis: int) -> Tensor:
    """Allocate the output of these queries, stored as [S, B, N, width]: the order in which fused
    kernels write it and the next layer reads it."""
    if axis == 0:
        return q.new_empty((*q.shape[:3], width))
    batch, heads, length, _ = q.shape
    return q.new_empty((length, batch, heads, width)).permute(1, 2, 0, 3)


def _slice(x: Tensor, where: slice, axis: int) -> Tensor:
    return x.narrow(axis, where.start, where.stop - where.start)


def _rows_of(x_BNS: Tensor, axis: int) -> Tensor:
    """Reshape a factor per query to scale an output's rows."""
    return x_BNS.unsqueeze(-1) if axis == 2 else as_column(x_BNS)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
