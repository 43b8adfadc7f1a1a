"""Operators by Liger's Triton kernels, for GPUs; the package is imported at the first call.

Each wrapper converts layouts to those of the kernel. The kernels modify their inputs in place, so
tensors of the caller are copied first.

Source: Liger Kernel, arXiv:2410.10989; github.com/linkedin/Liger-Kernel, version 0.8.5.
"""

# S sequence on this rank, B batch, N query heads, G key-value heads, D head width, R rotated width

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ascend_run.ops.autograd_function import Function
from ascend_run.ops.elementwise.rms_norm import plain_rms_norm
from ascend_run.ops.elementwise.rotary import plain_rotary, plain_split_qkv_rotary, split_qkv

# Statistics and matmuls in float32, rounded once, as in the torch implementation.
_CASTING = "gemma"


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Implement PlatformOps.rms_norm. The gradient is not written in place of its upstream
    gradient, which a residual may still need. float64, which the kernel lacks, uses torch."""
    if x.dtype is torch.float64:
        return plain_rms_norm(x, weight_H, eps)
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    out: Tensor = LigerRMSNormFunction.apply(x, weight_H, eps, 0.0, _CASTING, False)
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """Implement PlatformOps.swiglu. Copies gate and up, which the kernel takes as separate
    tensors."""
    out: Tensor = _SwiGlu.apply(gate_up)
    return out


class _SwiGlu(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        from liger_kernel.ops.swiglu import swiglu_forward

        ctx.save_for_backward(gate_up)
        gate, up = (half.contiguous() for half in gate_up.chunk(2, dim=-1))
        out: Tensor = swiglu_forward(gate, up)[2]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        from liger_kernel.ops.swiglu import swiglu_backward

        (gate_up,) = ctx.saved_tensors
        gate, up = (
            half.clone(memory_format=torch.contiguous_format) for half in gate_up.chunk(2, -1)
        )
        return torch.cat(swiglu_backward(gate, up, dy.contiguous()), dim=-1)


def rotary(x_SBND: Tensor, cos_SR: Tensor, sin_SR: Tensor, interleaved: bool) -> Tensor:
    """Implement PlatformOps.rotary. Interleaved pairs, which the kernel lacks, use torch."""
    if interleaved:
        return plain_rotary(x_SBND, cos_SR, sin_SR, interleaved)
    no_keys = x_SBND.new_zeros((*x_SBND.shape[:2], 1, x_SBND.shape[3]))
    out: Tensor = _Rotary.apply(x_SBND, no_keys, cos_SR, sin_SR)[0]
    return out


def split_qkv_rotary(
    mixed_SBM: Tensor,
    cos_SR: Tensor,
    sin_SR: Tensor,
    sizes: tuple[int, int, int],
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Implement PlatformOps.split_qkv_rotary with q and k in one launch."""
    if interleaved:
        return plain_split_qkv_rotary(mixed_SBM, cos_SR, sin_SR, sizes, interleaved)
    q, k, v = split_qkv(mixed_SBM, sizes)
    q, k = _Rotary.apply(q, k, cos_SR, sin_SR)
    return q, k, v


class _Rotary(Function):
    """The kernel expects [batch, sequence] order and the inputs are [S, B], so S is passed as its
    batch, with the tables expanded for each row."""

    @staticmethod
    def forward(
        ctx: Any, q_SBND: Tensor, k_SBGD: Tensor, cos_SR: Tensor, sin_SR: Tensor
    ) -> tuple[Tensor, Tensor]:
        from liger_kernel.ops.rope import rope_forward

        ctx.save_for_backward(cos_SR, sin_SR)
        q, k, *_ = rope_forward(*_rows(q_SBND, k_SBGD), *_tables(cos_SR, sin_SR, q_SBND))
        return q.transpose(1, 2), k.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        from liger_kernel.ops.rope import rope_backward

        cos_SR, sin_SR = ctx.saved_tensors
        dq, dk = rope_backward(*_rows(dq, dk), *_tables(cos_SR, sin_SR, dq))
        return dq.transpose(1, 2), dk.transpose(1, 2), None, None


def _rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return contiguous [S, B, N, D] copies as [batch, heads, sequence, width] for the kernel."""
    return tuple(t.clone(memory_format=torch.contiguous_format).transpose(1, 2) for t in tensors)


def _tables(cos_SR: Tensor, sin_SR: Tensor, like_SBND: Tensor) -> tuple[Tensor, ...]:
    """Expand both tables to [S, B, R] in the tensors' dtype."""
    shape = (*like_SBND.shape[:2], cos_SR.shape[-1])
    return tuple(
        table.to(like_SBND.dtype)[:, None].expand(shape).contiguous() for table in (cos_SR, sin_SR)
    )
