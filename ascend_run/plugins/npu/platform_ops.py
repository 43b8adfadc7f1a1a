"""The table of fused operators on the NPU, each with its backward."""

# S sequence, B batch, N heads, D head width, R rotated width, H hidden size, F expert width

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ascend_run.plugin_api import PlatformOps

from . import operators


def platform_ops() -> PlatformOps:
    """torch_npu runs torch's own layer norm as one kernel; the others are its own operators."""
    return PlatformOps(
        rms_norm=rms_norm,
        layer_norm=lambda x, weight, bias, eps: F.layer_norm(x, (x.shape[-1],), weight, bias, eps),
        swiglu=swiglu,
        rotary=rotary,
    )


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """PlatformOps.rms_norm."""
    return _RmsNorm.apply(x, weight_H, eps)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        y, inverse = operators.rms_norm(x, weight_H, eps)
        ctx.save_for_backward(x, weight_H, inverse)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_H, inverse = ctx.saved_tensors
        dx, dweight = operators.rms_norm_backward(dy.contiguous(), x, weight_H, inverse)
        return dx, dweight.to(weight_H.dtype), None


def swiglu(gate_up: Tensor) -> Tensor:
    """PlatformOps.swiglu."""
    return _SwiGlu.apply(gate_up)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return operators.swiglu(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        return operators.swiglu_backward(dy.contiguous(), gate_up)


def rotary(x_SBND: Tensor, cos_SR: Tensor, sin_SR: Tensor, interleaved: bool) -> Tensor:
    """PlatformOps.rotary. Both entries of a pair have one angle, so the tables hold each twice."""
    width = cos_SR.shape[-1]
    cos, sin = (table.to(x_SBND.dtype)[:, None, None] for table in (cos_SR, sin_SR))
    rotated = _Rotary.apply(x_SBND[..., :width], cos, sin, interleaved)
    if width == x_SBND.shape[-1]:
        return rotated
    return torch.cat((rotated, x_SBND[..., width:]), dim=-1)


class _Rotary(torch.autograd.Function):
    """A rotation; its gradient is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return operators.rotary_mul(x.contiguous(), cos, sin, interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        dx = operators.rotary_mul(dy.contiguous(), cos, -sin, ctx.interleaved)
        return dx, None, None, None
