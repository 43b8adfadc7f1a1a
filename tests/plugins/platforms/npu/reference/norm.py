"""Norms, as documented."""

from __future__ import annotations

import torch
from torch import Tensor


def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    assert input.dtype == gamma.dtype
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    inverse = 1.0 / (wide.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()
    return (wide * inverse * gamma).to(input.dtype), inverse


def npu_rms_norm_backward(
    dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    wide = rstd.dtype
    normalised, weighted = input.to(wide) * rstd, dy.to(wide) * gamma.to(wide)
    mean = (weighted * normalised).mean(-1, keepdim=True)
    dx = (weighted - normalised * mean) * rstd
    dgamma = (dy.to(wide) * normalised).flatten(0, -2).sum(0)
    return dx.to(input.dtype), dgamma


def npu_add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    assert x1.shape == x2.shape
    assert x1.dtype == x2.dtype == gamma.dtype
    total = x1 + x2
    return *npu_rms_norm(total, gamma, epsilon), total


def npu_add_layer_norm(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    beta: Tensor,
    epsilon: float = 1e-5,
    additional_output: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert x1.shape == x2.shape
    assert x1.dtype == x2.dtype == gamma.dtype == beta.dtype
    assert additional_output, "without it the sum is not answered"
    total = x1 + x2
    wide = total.to(torch.promote_types(total.dtype, torch.float32))
    mean = wide.mean(-1, keepdim=True)
    inverse = 1.0 / (wide.var(-1, correction=0, keepdim=True) + epsilon).sqrt()
    y = ((wide - mean) * inverse * gamma + beta).to(x1.dtype)
    return y, mean, inverse, total
