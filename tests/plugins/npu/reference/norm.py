"""Normalisations, as documented."""

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
