"""The linear of a router, in a wider dtype than that of its operands."""

# T tokens (any leading dims), H hidden size, X experts

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ascend_run.ops.autograd_function import Function


def wide_linear(
    x_TH: Tensor, weight_XH: Tensor, bias_X: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Compute ``x @ weight.T + bias`` in ``dtype``, [T, X].

    It saves its operands, where autograd would save copies of them in ``dtype``.

    Numerics: bitwise those of ``F.linear`` with operands that are cast before, in backward too.
    """
    if x_TH.dtype == weight_XH.dtype == dtype:
        return F.linear(x_TH, weight_XH, bias_X)
    out: Tensor = _WideLinear.apply(x_TH, weight_XH, bias_X, dtype)
    return out


class _WideLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.dtypes = tuple(None if t is None else t.dtype for t in (x, weight, bias))
        return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.dtypes
        rows = dy.flatten(0, -2)
        dx = None if weight is None else (dy @ weight.to(dy.dtype)).to(of_x)
        dweight = None
        if x is not None:
            dweight = (rows.t() @ x.to(dy.dtype).flatten(0, -2)).to(of_weight)
        dbias = rows.sum(0).to(of_bias) if ctx.needs_input_grad[2] else None
        return dx, dweight, dbias, None
