"""Attention of the kernel contract's layouts by a fused kernel that wants heads before sequence.

Biases, softcap and dropout change the scores in ways that a fused kernel cannot follow in backward:
those run in ``blockwise_attention``. Sinks are a correction of the log-sum-exp.
"""

# S sequence, B batch, N query heads, D width of q and k, E width of v

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import blockwise_attention, halved_attention, pieced_attention
from .pieced_attention import FusedKernel


def forward(
    kernel: FusedKernel | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: Any,
    *,
    in_blocks: bool,
    by_halves: bool = False,
) -> tuple[Tensor, Tensor]:
    """[S, B, N, D] or packed [T, N, D] -> output alike, and log-sum-exp [B, N, S] or [N, T].

    Args:
        in_blocks: Not by the kernel.
        by_halves: Causal squares cost it less so (``halved_attention``); for backward the same.
    """
    if q.dim() == 3:
        single = (t.unsqueeze(1) for t in (q, k, v))
        out, lse = forward(kernel, *single, spec, in_blocks=in_blocks, by_halves=by_halves)
        return out.squeeze(1), lse.squeeze(0)
    tensors = [_heads_first(t) for t in (q, k, v)]
    if in_blocks or kernel is None:
        out, lse = blockwise_attention.forward(*tensors, spec)
    else:
        pieces = halved_attention if by_halves else pieced_attention
        out, lse = pieces.forward(kernel, *tensors, spec.mask, spec.scale)
    if spec.sinks is not None:
        out, lse = pieced_attention.with_sinks(out, lse, spec.sinks, axis=2)
    return _sequence_first(out), lse


def backward(
    kernel: FusedKernel | None,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    spec: Any,
    *,
    in_blocks: bool,
    by_halves: bool = False,
) -> tuple[Tensor, ...]:
    """(dq, dk, dv), then that of a bias that requires one, then that of sinks."""
    if q.dim() == 3:
        single = (t.unsqueeze(1) for t in (dout, q, k, v, out))
        options = {"in_blocks": in_blocks, "by_halves": by_halves}
        dq, dk, dv, *extras = backward(kernel, *single, lse.unsqueeze(0), spec, **options)
        return dq.squeeze(1), dk.squeeze(1), dv.squeeze(1), *extras
    tensors = [_heads_first(t) for t in (dout, q, k, v, out)]
    extras = []
    if in_blocks or kernel is None:
        dq, dk, dv, *extras = blockwise_attention.backward(*tensors, lse, spec)
    else:
        pieces = halved_attention if by_halves else pieced_attention
        dq, dk, dv = pieces.backward(kernel, *tensors, lse, spec.mask, spec.scale)
    if spec.sinks is not None:
        extras.append(
            pieced_attention.sink_gradient(tensors[0], tensors[4], lse, spec.sinks, axis=2)
        )
    return (*(_sequence_first(t) for t in (dq, dk, dv)), *extras)


def in_blocks_forward(q: Tensor, k: Tensor, v: Tensor, spec: Any) -> tuple[Tensor, Tensor]:
    """``forward`` without any fused kernel."""
    return forward(None, q, k, v, spec, in_blocks=True)


def in_blocks_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: Any
) -> tuple[Tensor, ...]:
    """``backward`` without any fused kernel."""
    return backward(None, dout, q, k, v, out, lse, spec, in_blocks=True)


def _heads_first(x_SBND: Tensor) -> Tensor:
    x_BNSD = x_SBND.permute(1, 2, 0, 3)
    # Fused kernels take any strides but the last one's, which they assume to be 1.
    return x_BNSD if x_BNSD.stride(-1) == 1 else x_BNSD.contiguous()


def _sequence_first(x_BNSD: Tensor) -> Tensor:
    return x_BNSD.permute(2, 0, 1, 3)
