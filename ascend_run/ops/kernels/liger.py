"""Operators by Liger's Triton kernels, for GPUs; the package is imported at the first call.

Each wrapper brings our layouts to what a kernel takes. Its kernels write over what they are given:
what belongs to the caller is copied before.

Source: Liger Kernel, arXiv:2410.10989; github.com/linkedin/Liger-Kernel, version 0.8.5.
"""

# S sequence on this rank, B batch, N query heads, G key-value heads, D head width, R rotated width

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ascend_run.ops.elementwise.rotary import plain_rotary, plain_split_qkv_rotary, split_qkv

# Statistics and products in float32, rounded once, as ours.
_CASTING = "gemma"


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """PlatformOps.rms_norm. The gradient is not written over its upstream: a residual may hold
    that."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(x, weight_H, eps, 0.0, _CASTING, False)


def swiglu(gate_up: Tensor) -> Tensor:
    """PlatformOps.swiglu. The kernel takes gate and up as tensors of their own: both are copied."""
    return _SwiGlu.apply(gate_up)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        from liger_kernel.ops.swiglu import swiglu_forward

        ctx.save_for_backward(gate_up)
        gate, up = (half.contiguous() for half in gate_up.chunk(2, dim=-1))
        return swiglu_forward(gate, up)[2]

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
    """PlatformOps.rotary. Pairs of neighbours are not the kernel's: those are torch's."""
    if interleaved:
        return plain_rotary(x_SBND, cos_SR, sin_SR, interleaved)
    no_keys = x_SBND.new_zeros((*x_SBND.shape[:2], 1, x_SBND.shape[3]))
    return _Rotary.apply(x_SBND, no_keys, cos_SR, sin_SR)[0]


def split_qkv_rotary(
    mixed_SBM: Tensor,
    cos_SR: Tensor,
    sin_SR: Tensor,
    sizes: tuple[int, int, int],
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """PlatformOps.split_qkv_rotary: q and k in one launch."""
    if interleaved:
        return plain_split_qkv_rotary(mixed_SBM, cos_SR, sin_SR, sizes, interleaved)
    q, k, v = split_qkv(mixed_SBM, sizes)
    q, k = _Rotary.apply(q, k, cos_SR, sin_SR)
    return q, k, v


class _Rotary(torch.autograd.Function):
    """The kernel walks over [batch, sequence] in that order and ours lie as [S, B], so our sequence
    is its batch, and the tables are given for each row of it."""

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

        dq, dk = rope_backward(*_rows(dq, dk), *_tables(*ctx.saved_tensors, dq))
        return dq.transpose(1, 2), dk.transpose(1, 2), None, None


def _rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Copies, contiguous as [S, B, N, D], in the kernel's [batch, heads, sequence, width]."""
    return tuple(t.clone(memory_format=torch.contiguous_format).transpose(1, 2) for t in tensors)


def _tables(cos_SR: Tensor, sin_SR: Tensor, like_SBND: Tensor) -> tuple[Tensor, ...]:
    """[S, B, R] both, in the tensors' dtype."""
    shape = (*like_SBND.shape[:2], cos_SR.shape[-1])
    return tuple(
        table.to(like_SBND.dtype)[:, None].expand(shape).contiguous() for table in (cos_SR, sin_SR)
    )
