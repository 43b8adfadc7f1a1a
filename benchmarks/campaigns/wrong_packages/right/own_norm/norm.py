"""The norm; imports torch."""

# H = hidden size

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ascend_run.ops.tensor_marks import mark


class Normalise(torch.autograd.Function):
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normal = x * scale
        dnormal = dout * weight
        dx = scale * (dnormal - normal * (dnormal * normal).mean(-1, keepdim=True))
        dweight = (dout * normal).flatten(0, -2).sum(0)
        return dx, dweight, None


class OwnRootMeanSquareNorm(nn.Module):
    """RMSNorm, built with Megatron's arguments. [..., H] -> [..., H]."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        mark(self.weight, sequence_parallel=config.sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Normalise.apply(x, self.weight, self.eps)
        return out
