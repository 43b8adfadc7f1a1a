"""RMS norm in one autograd node with a manual backward.

Source: Zhang and Sennrich 2019, arXiv:1910.07467.
"""

# T all leading dims flattened, H hidden size

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ascend_run.ops.autograd_function import Function


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Compute ``x / sqrt(mean(x * x) + eps) * weight`` over the last dim.

    Shapes and dtypes: [..., H] -> [..., H] in x's dtype; any strides.
    Numerics: in float32 (float64 for float64), rounded once. Within a torch.compile graph it runs
    ``plain_rms_norm``, which the compiler fuses.
    """
    if torch.compiler.is_compiling():
        return plain_rms_norm(x, weight_H, eps)
    out: Tensor = _RmsNorm.apply(x, weight_H, eps)
    return out


def plain_rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Compute ``rms_norm`` by torch operations, differentiated by autograd."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    inverse = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * inverse * weight_H).to(x.dtype)


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        x_wide = x.to(wide)
        inverse = x_wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_H, inverse)
        return (x_wide * inverse).mul_(weight_H).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight_H, inverse = ctx.saved_tensors
        wants_x, wants_weight, _ = ctx.needs_input_grad
        wide, hidden = inverse.dtype, x.shape[-1]
        normalised = x.to(wide) * inverse
        dy_wide = dy.to(wide)
        products_TH = (normalised * dy_wide).reshape(-1, hidden)
        dweight = products_TH.sum(0).to(weight_H.dtype) if wants_weight else None
        if not wants_x:
            return None, dweight, None
        # The gradient through the mean of squares: its coefficient of x, for each row.
        along = torch.mv(products_TH, weight_H.to(wide)).div_(-hidden).view_as(inverse)
        dx = normalised.mul_(along).addcmul_(dy_wide, weight_H.to(wide)).mul_(inverse)
        return dx.to(x.dtype), dweight, None
