"""Activations of the MLP, as documented."""

from __future__ import annotations

import torch
from torch import Tensor


def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    a, b = input.chunk(2, dim)
    return a * torch.sigmoid(a) * b


def npu_swiglu_backward(grad_output: Tensor, input: Tensor, dim: int = -1) -> Tensor:
    a, b = input.chunk(2, dim)
    s = torch.sigmoid(a)
    da = grad_output * b * (s + a * s * (1 - s))
    return torch.cat((da, grad_output * a * s), dim)
