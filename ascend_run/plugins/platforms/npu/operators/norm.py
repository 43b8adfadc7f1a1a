"""Normalisation operators."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (normalised rows, reciprocal root mean square of each row in float32)."""
    y, inverse = torch.ops.npu.npu_rms_norm(x, weight_H, eps)
    return y, inverse


def rms_norm_backward(
    dy: Tensor, x: Tensor, weight_H: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (gradient of x, gradient of the weight in float32)."""
    dx, dweight = torch.ops.npu.npu_rms_norm_backward(dy, x, weight_H, inverse)
    return dx, dweight


def add_rms_norm(
    x: Tensor, residual: Tensor, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (normalised sum, reciprocal root mean square of each row in float32, the sum)."""
    y, inverse, summed = torch.ops.npu.npu_add_rms_norm(x, residual, weight_H, eps)
    return y, inverse, summed


def add_layer_norm(
    x: Tensor, residual: Tensor, weight_H: Tensor, bias_H: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (normalised sum, mean and reciprocal deviation of each row in float32, the sum)."""
    y, mean, inverse, summed = torch.ops.npu.npu_add_layer_norm(
        x, residual, weight_H, bias_H, eps, additional_output=True
    )
    return y, mean, inverse, summed
