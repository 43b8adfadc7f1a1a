"""Dropout, residual add and norm in one autograd node with a manual backward.

Saves for backward the sum, one or two statistics a row, the mask, and the input only if one of its
scales requires a gradient; recomputes the normalised values.

Source: the kernel of the same name in flash-attention (Dao 2022, arXiv:2205.14135) and its
description in MindSpeed's operator documentation, npu_dropout_add_layer_norm.
"""

# ... leading dims (rows), H hidden size

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ascend_run.ops.autograd_function import Function


class DropoutAddNorm(NamedTuple):
    """Outputs of the operator."""

    out: Tensor
    """Normalised, in x's dtype."""
    summed: Tensor
    """Input of the norm: the next residual. In the residual's dtype."""
    mask: Tensor | None
    """True where x is kept, bool; None without dropout."""


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
    """Compute ``layer_norm(dropout(x * rowscale * layerscale) + residual)``.

    Shapes: x and residual [..., H], rowscale [...], the others [H].

    Args:
        p: Dropout probability, in [0, 1); 0 in evaluation.
        residual_in_fp32: Whether the sum is float32 if there is no residual.
        mask: The dropout mask; None draws one. Pass the mask of an earlier call to repeat it.

    Numerics: in float32 (float64 for float64); the norm applies to the sum as returned, rounded.
    Differentiable in all floating inputs; also through ``summed``.
    """
    mask = drawn_mask(x, p, mask)
    dtype = sum_dtype(x, residual, residual_in_fp32)
    scales = (rowscale, layerscale_H, mask)
    out, summed = _apply(x, residual, weight_H, bias_H, *scales, p, eps, dtype, False)
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
    """Compute ``dropout_add_layer_norm`` with RMS norm, which subtracts no mean."""
    mask = drawn_mask(x, p, mask)
    dtype = sum_dtype(x, residual, residual_in_fp32)
    scales = (rowscale, layerscale_H, mask)
    out, summed = _apply(x, residual, weight_H, bias_H, *scales, p, eps, dtype, True)
    return DropoutAddNorm(out, summed, mask)


def sum_dtype(x: Tensor, residual: Tensor | None, in_fp32: bool) -> torch.dtype:
    """Return the dtype of the sum: the residual's if there is one."""
    if residual is not None:
        return residual.dtype
    return torch.promote_types(x.dtype, torch.float32) if in_fp32 else x.dtype


def scaled_and_dropped(
    x: Tensor, rowscale: Tensor | None, layerscale_H: Tensor | None, mask: Tensor | None, p: float
) -> Tensor:
    """Compute ``dropout(x * rowscale * layerscale)`` in the dtype of x, by torch operations."""
    if rowscale is not None:
        x = x * rowscale.unsqueeze(-1)
    if layerscale_H is not None:
        x = x * layerscale_H
    return x if mask is None else x * mask * (1 / (1 - p))


def drawn_mask(x: Tensor, p: float, mask: Tensor | None) -> Tensor | None:
    """Return the given dropout mask, or draw one; None without dropout."""
    if not 0 <= p < 1:
        raise ValueError(f"dropout p={p}; expected 0 <= p < 1")
    if p == 0 or mask is not None:
        return mask if p else None
    return torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p)


def _apply(*arguments: Any) -> tuple[Tensor, Tensor]:
    if torch.compiler.is_compiling():
        return _plain(*arguments)
    outputs: tuple[Tensor, Tensor] = _DropoutAddNorm.apply(*arguments)
    return outputs


def _plain(
    x: Tensor,
    residual: Tensor | None,
    weight_H: Tensor,
    bias_H: Tensor | None,
    rowscale: Tensor | None,
    layerscale_H: Tensor | None,
    mask: Tensor | None,
    p: float,
    eps: float,
    dtype: torch.dtype,
    is_rms: bool,
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    dropped = scaled_and_dropped(x.to(wide), rowscale, layerscale_H, mask, p)
    summed = (dropped if residual is None else dropped + residual).to(dtype)
    normalised, _, _ = _normalised(summed.to(wide), eps, is_rms)
    out = normalised * weight_H
    return (out if bias_H is None else out + bias_H).to(x.dtype), summed


def _normalised(z: Tensor, eps: float, is_rms: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return (normalised, mean, reciprocal deviation), the last two one a row."""
    mean = None if is_rms else z.mean(-1, keepdim=True)
    centred = z if mean is None else z - mean
    inverse = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    return centred * inverse, mean, inverse


class _DropoutAddNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight_H: Tensor,
        bias_H: Tensor | None,
        rowscale: Tensor | None,
        layerscale_H: Tensor | None,
        mask: Tensor | None,
        p: float,
        eps: float,
        dtype: torch.dtype,
        is_rms: bool,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(x.dtype, torch.float32)
        dropped = scaled_and_dropped(x.to(wide), rowscale, layerscale_H, mask, p)
        summed = (dropped if residual is None else dropped + residual).to(dtype)
        normalised, mean, inverse = _normalised(summed.to(wide), eps, is_rms)
        scales_learn = any(ctx.needs_input_grad[4:6])
        ctx.save_for_backward(
            x if scales_learn else None,
            weight_H,
            rowscale,
            layerscale_H,
            mask,
            summed,
            mean,
            inverse,
        )
        ctx.dtypes = (
            x.dtype,
            None if residual is None else residual.dtype,
            None if bias_H is None else bias_H.dtype,
        )
        ctx.keep = 1 - p
        out = normalised.mul_(weight_H)
        return (out if bias_H is None else out.add_(bias_H)).to(x.dtype), summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dsummed: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_H, rowscale, layerscale_H, mask, summed, mean, inverse = ctx.saved_tensors
        x_dtype, residual_dtype, bias_dtype = ctx.dtypes
        wide, hidden = inverse.dtype, summed.shape[-1]
        centred = summed.to(wide) if mean is None else summed.to(wide) - mean
        normalised = centred * inverse
        dout_wide = dout.to(wide)
        rows = dout_wide.reshape(-1, hidden)
        dbias = None if bias_dtype is None else rows.sum(0).to(bias_dtype)
        dweight = (dout_wide * normalised).reshape(-1, hidden).sum(0).to(weight_H.dtype)
        weighted = dout_wide * weight_H
        dz = weighted - normalised * (weighted * normalised).mean(-1, keepdim=True)
        if mean is not None:
            dz -= weighted.mean(-1, keepdim=True)
        dz = dz.mul_(inverse).add_(dsummed)
        dresidual = None if residual_dtype is None else dz.to(residual_dtype)
        if mask is not None:
            dz = dz * mask * (1 / ctx.keep)
        dx = dz if rowscale is None else dz * rowscale.unsqueeze(-1)
        drowscale = dlayerscale = None
        if rowscale is not None and ctx.needs_input_grad[4]:
            along = dz * x if layerscale_H is None else dz * x * layerscale_H
            drowscale = along.sum(-1).to(rowscale.dtype)
        if layerscale_H is not None:
            if ctx.needs_input_grad[5]:
                dlayerscale = (dx * x).reshape(-1, hidden).sum(0).to(layerscale_H.dtype)
            dx = dx * layerscale_H
        gradients = (dx.to(x_dtype), dresidual, dweight, dbias, drowscale, dlayerscale)
        return *gradients, None, None, None, None, None
