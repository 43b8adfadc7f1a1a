"""Dropout, residual addition and norm: dropout in torch, addition and norm in one operator."""

# ... leading axes (rows), H hidden size

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ascend_run.ops.autograd_function import Function
from ascend_run.ops.elementwise import dropout_add_norm as torch_form
from ascend_run.ops.elementwise.dropout_add_norm import (
    DropoutAddNorm,
    drawn_mask,
    scaled_and_dropped,
)
from ascend_run.plugins.platforms.npu.operators import norm as operators


def dropout_add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight_H: Tensor,
    bias_H: Tensor | None,
    p: float,
    eps: float,
    *,
    rowscale: Tensor | None = None,
    layerscale_H: Tensor | None = None,
    residual_in_fp32: bool = False,
    mask: Tensor | None = None,
) -> DropoutAddNorm:
    """Implement ``ops.elementwise.dropout_add_norm.dropout_add_layer_norm``.

    Fused if all dtypes are equal.
    """
    mask = drawn_mask(x, p, mask)
    if residual is None or not residual.dtype == x.dtype == weight_H.dtype:
        return torch_form.dropout_add_layer_norm(
            x,
            residual,
            weight_H,
            bias_H,
            p,
            eps,
            rowscale=rowscale,
            layerscale_H=layerscale_H,
            residual_in_fp32=residual_in_fp32,
            mask=mask,
        )
    dropped = scaled_and_dropped(x, rowscale, layerscale_H, mask, p)
    bias = torch.zeros_like(weight_H) if bias_H is None else bias_H
    out, summed = _AddLayerNorm.apply(dropped, residual, weight_H, bias, eps)
    return DropoutAddNorm(out, summed, mask)


def dropout_add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight_H: Tensor,
    bias_H: Tensor | None,
    p: float,
    eps: float,
    *,
    rowscale: Tensor | None = None,
    layerscale_H: Tensor | None = None,
    residual_in_fp32: bool = False,
    mask: Tensor | None = None,
) -> DropoutAddNorm:
    """Implement ``ops.elementwise.dropout_add_norm.dropout_add_rms_norm``.

    Fused if all dtypes are equal.
    """
    mask = drawn_mask(x, p, mask)
    if residual is None or not residual.dtype == x.dtype == weight_H.dtype:
        return torch_form.dropout_add_rms_norm(
            x,
            residual,
            weight_H,
            bias_H,
            p,
            eps,
            rowscale=rowscale,
            layerscale_H=layerscale_H,
            residual_in_fp32=residual_in_fp32,
            mask=mask,
        )
    dropped = scaled_and_dropped(x, rowscale, layerscale_H, mask, p)
    out, summed = _AddRmsNorm.apply(dropped, residual, weight_H, eps)
    return DropoutAddNorm(out if bias_H is None else out + bias_H, summed, mask)


class _AddLayerNorm(Function):
    """Backward is torch's layer norm backward, which torch_npu runs as one kernel."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight_H: Tensor, bias_H: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        arguments = (x.contiguous(), residual.contiguous(), weight_H, bias_H)
        out, mean, inverse, summed = operators.add_layer_norm(*arguments, eps)
        ctx.save_for_backward(summed, mean, inverse, weight_H, bias_H)
        return out, summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dsummed: Tensor) -> tuple[Tensor | None, ...]:
        summed, mean, inverse, weight_H, bias_H = ctx.saved_tensors
        dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
            dout.contiguous(),
            summed,
            [summed.shape[-1]],
            mean,
            inverse,
            weight_H,
            bias_H,
            [True, True, True],
        )
        dx = dx + dsummed
        return dx, dx, dweight, dbias, None


class _AddRmsNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight_H: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        arguments = (x.contiguous(), residual.contiguous(), weight_H)
        out, inverse, summed = operators.add_rms_norm(*arguments, eps)
        ctx.save_for_backward(summed, inverse, weight_H)
        return out, summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dsummed: Tensor) -> tuple[Tensor | None, ...]:
        summed, inverse, weight_H = ctx.saved_tensors
        dx, dweight = operators.rms_norm_backward(dout.contiguous(), summed, weight_H, inverse)
        dx = dx + dsummed
        return dx, dx, dweight.to(weight_H.dtype), None
