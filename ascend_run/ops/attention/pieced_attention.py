"""Attention by a device's fused kernel, rectangle by rectangle of what a mask leaves visible.

A fused kernel knows few shapes of masks; ``visibility`` cuts any mask into those. Gradients are
taken from the output and the log-sum-exp that backward is given, so that whoever merged several
attentions (a ring) may pass the merged ones.
"""

# S queries, J keys, B batch, N query heads, G key-value heads, D width of q and k, E width of v;
# the sequence stands at the kernel's own axis: [S, B, N, D] or [B, N, S, D]

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from .visibility import MaskRules, Rectangle, rectangles


class FusedKernel(Protocol):
    """One rectangle's attention on one device. q, k and v have one width here."""

    sequence_axis: int
    """Of q, k, v and out: 0 or 2. The log-sum-exp is [B, N, S] always."""
    band_block: int | None
    """Queries of a banded rectangle at most; None where a band is cheap to give."""

    def cut(self, part: Rectangle) -> Sequence[Rectangle]:
        """The same pairs of queries and keys in rectangles that the kernel takes; each query still
        in one of them only."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, part: Rectangle, scale: float
    ) -> tuple[Tensor, Tensor]:
        """(out, log-sum-exp) of tensors that are cut to the rectangle; where it starts says where
        they were cut from."""
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
        """(dq, dk, dv) of one rectangle, whose queries may see more keys outside of it."""
        ...


def forward(
    kernel: FusedKernel, q: Tensor, k: Tensor, v: Tensor, mask: MaskRules, scale: float
) -> tuple[Tensor, Tensor]:
    """Output in q's dtype with the width of v, and the log-sum-exp in float32 (float64).

    A query that sees no key gives zeros and -inf.
    """
    axis = kernel.sequence_axis
    parts = _parts(kernel, mask, q.shape[axis], k.shape[axis])
    width = v.shape[-1]
    q, k, v = one_width(q, k, v)
    if _covers_all(parts, q.shape[axis], k.shape[axis]):
        out, lse = kernel.forward(q, k, v, parts[0], scale)
        return out[..., :width], lse
    covered = _in_turn([part.queries for part in parts], q.shape[axis])
    out = _sequence_first(q, width, axis)
    heads = (q.shape[1:3]) if axis == 0 else q.shape[:2]
    lse = q.new_empty((*heads, q.shape[axis]), dtype=_wide(q.dtype))
    if not covered:
        out.zero_()
        lse.fill_(-torch.inf)
    for part in parts:
        keys = (_cut(k, part.keys, axis), _cut(v, part.keys, axis))
        part_out, part_lse = kernel.forward(_cut(q, part.queries, axis), *keys, part, scale)
        _cut(out, part.queries, axis).copy_(part_out[..., :width])
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
    mask: MaskRules,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v in their dtypes; sums over rectangles are float32 at least."""
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
    if not _in_turn([part.queries for part in parts], q.shape[axis]):
        dq.zero_()
    # Several rectangles may share keys; then these add up.
    alone = _in_turn([part.keys for part in parts], k.shape[axis])
    if alone:
        dk, dv = torch.empty_like(k), torch.empty_like(v)
    else:
        dk, dv = (torch.zeros_like(t, dtype=_wide(dtype)) for t in (k, v))
    for part in parts:
        dout_rows, q_rows, out_rows = (_cut(t, part.queries, axis) for t in (dout, q, out))
        keys = (_cut(k, part.keys, axis), _cut(v, part.keys, axis))
        part_dq, part_dk, part_dv = kernel.backward(
            dout_rows,
            q_rows,
            *keys,
            out_rows,
            lse[:, :, part.queries].contiguous(),
            part,
            scale,
        )
        _cut(dq, part.queries, axis).copy_(part_dq)
        for sums, gradient in ((dk, part_dk), (dv, part_dv)):
            place = _cut(sums, part.keys, axis)
            place.copy_(gradient) if alone else place.add_(gradient)
    return dq[..., :q_width], dk[..., :q_width].to(dtype), dv[..., :v_width].to(dtype)


def with_sinks(out: Tensor, lse: Tensor, sinks_N: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Let one more logit a head, which gives no value, take its share of probability."""
    with_sink = torch.logaddexp(lse, sinks_N.to(lse.dtype)[:, None])
    share = _rows_of(torch.exp(lse - with_sink), axis)
    return (out * share).to(out.dtype), with_sink


def sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks_N: Tensor, axis: int) -> Tensor:
    """A sink takes ``exp(sink - lse)`` and gives no value, so it only lowers the others."""
    dot = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    dot_BNS = dot if axis == 2 else dot.permute(1, 2, 0)
    probability_BNS = (sinks_N.to(lse.dtype)[:, None] - lse).exp()
    return -(probability_BNS * dot_BNS).sum((0, 2)).to(sinks_N.dtype)


def one_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Fused kernels want one width: zeros beside q and k change no score, beside v no sum."""
    difference = q.shape[-1] - v.shape[-1]
    if difference > 0:
        return q, k, F.pad(v, (0, difference))
    if difference < 0:
        return F.pad(q, (0, -difference)), F.pad(k, (0, -difference)), v
    return q, k, v


def _parts(
    kernel: FusedKernel, mask: MaskRules, num_queries: int, num_keys: int
) -> tuple[Rectangle, ...]:
    whole = rectangles(mask, num_queries, num_keys, band_block=kernel.band_block)
    return tuple(piece for part in whole for piece in kernel.cut(part))


def _covers_all(parts: Sequence[Rectangle], num_queries: int, num_keys: int) -> bool:
    """Whether one rectangle is the whole score matrix."""
    if len(parts) != 1:
        return False
    (part,) = parts
    return part.queries == slice(0, num_queries) and part.keys == slice(0, num_keys)


def _in_turn(runs: Sequence[slice], length: int) -> bool:
    """Whether they lie one after the other and leave nothing out, as documents do."""
    starts = [0, *(run.stop for run in runs)]
    return starts[-1] == length and all(
        run.start == start for run, start in zip(runs, starts, strict=False)
    )


def _sequence_first(q: Tensor, width: int, axis: int) -> Tensor:
    """Room for an output of these queries, [S, B, N, width] in memory as fused kernels write it and
    the next layer reads it."""
    if axis == 0:
        return q.new_empty((*q.shape[:3], width))
    batch, heads, length, _ = q.shape
    return q.new_empty((length, batch, heads, width)).permute(1, 2, 0, 3)


def _cut(x: Tensor, where: slice, axis: int) -> Tensor:
    return x.narrow(axis, where.start, where.stop - where.start)


def _rows_of(x_BNS: Tensor, axis: int) -> Tensor:
    """A factor a query, to be multiplied with an output."""
    return (x_BNS if axis == 2 else x_BNS.permute(2, 0, 1)).unsqueeze(-1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
