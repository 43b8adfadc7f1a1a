"""Adapts the kernel contract's layouts to fused kernels in heads-first layout.

Biases, softcap and dropout change the scores in ways that fused kernels do not support in backward:
``blockwise_attention`` computes them. Sinks are a correction of the log-sum-exp.
"""

# S sequence, B batch, N query heads, D width of q and k, E width of v

from __future__ import annotations

from torch import Tensor

from ascend_run.types.attention import AttentionSpec

from . import blockwise_attention, halved_attention, pieced_attention
from .pieced_attention import FusedKernel


def forward(
    kernel: FusedKernel | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    *,
    in_blocks: bool,
    by_halves: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute attention on [S, B, N, D] or packed [T, N, D].

    Args:
        in_blocks: Use ``blockwise_attention`` and not the kernel.
        by_halves: Use ``halved_attention``, for a kernel that computes short causal squares faster
            that way; pass the same value to ``backward``.

    Returns:
        The output in the layout of q, and the log-sum-exp [B, N, S] or [N, T].
    """
    if q.dim() == 3:
        q, k, v = (t.unsqueeze(1) for t in (q, k, v))
        out, lse = forward(kernel, q, k, v, spec, in_blocks=in_blocks, by_halves=by_halves)
        return out.squeeze(1), lse.squeeze(0)
    q, k, v = (_heads_first(t) for t in (q, k, v))
    if in_blocks or kernel is None:
        out, lse = blockwise_attention.forward(q, k, v, spec)
    else:
        by_kernel = halved_attention.forward if by_halves else pieced_attention.forward
        out, lse = by_kernel(kernel, q, k, v, spec.mask, spec.scale)
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
    spec: AttentionSpec,
    *,
    in_blocks: bool,
    by_halves: bool = False,
) -> tuple[Tensor, ...]:
    """Return (dq, dk, dv), then the gradient of a bias that requires one, then that of sinks."""
    if q.dim() == 3:
        dout, q, k, v, out = (t.unsqueeze(1) for t in (dout, q, k, v, out))
        lse = lse.unsqueeze(0)
        dq, dk, dv, *extras = backward(
            kernel, dout, q, k, v, out, lse, spec, in_blocks=in_blocks, by_halves=by_halves
        )
        return dq.squeeze(1), dk.squeeze(1), dv.squeeze(1), *extras
    dout, q, k, v, out = (_heads_first(t) for t in (dout, q, k, v, out))
    extras = []
    if in_blocks or kernel is None:
        dq, dk, dv, *extras = blockwise_attention.backward(dout, q, k, v, out, lse, spec)
    else:
        by_kernel = halved_attention.backward if by_halves else pieced_attention.backward
        dq, dk, dv = by_kernel(kernel, dout, q, k, v, out, lse, spec.mask, spec.scale)
    if spec.sinks is not None:
        extras.append(pieced_attention.sink_gradient(dout, out, lse, spec.sinks, axis=2))
    return (*(_sequence_first(t) for t in (dq, dk, dv)), *extras)


def in_blocks_forward(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Run ``forward`` without a fused kernel."""
    return forward(None, q, k, v, spec, in_blocks=True)


def in_blocks_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec
) -> tuple[Tensor, ...]:
    """Run ``backward`` without a fused kernel."""
    return backward(None, dout, q, k, v, out, lse, spec, in_blocks=True)


def all_given(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Return the tensors, none of which may be None: for kernels whose backward reads all five."""
    given = tuple(tensor for tensor in tensors if tensor is not None)
    assert len(given) == len(tensors)
    return given


def _heads_first(x_SBND: Tensor) -> Tensor:
    x_BNSD = x_SBND.permute(1, 2, 0, 3)
    # Fused kernels take any strides, but assume the last one to be 1.
    return x_BNSD if x_BNSD.stride(-1) == 1 else x_BNSD.contiguous()


def _sequence_first(x_BNSD: Tensor) -> Tensor:
    return x_BNSD.permute(2, 0, 1, 3)
