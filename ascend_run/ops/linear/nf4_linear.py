"""Linear layers on a frozen NF4 weight."""

# K inputs, M outputs

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ascend_run.ops.autograd_function import Function

from .nf4 import Nf4, dequantise


def nf4_linear(x: Tensor, weight_MK: Nf4) -> Tensor:
    """Compute ``x @ weight.T``, [..., K] -> [..., M], in the input's dtype.

    Nothing is saved for backward, which dequantises the weight again: beside the quantised weight,
    one dequantised weight exists during forward and during backward, and none between.

    Numerics: output and gradient equal those of ``F.linear`` on the dequantised weight in every
    bit. Only the input has a gradient.

    Raises:
        ValueError: If the weight is no matrix, or not of the input's width.
    """
    shape = tuple(weight_MK.shape)
    if len(shape) != 2 or shape[1] != x.shape[-1]:
        raise ValueError(
            f"an input of shape {tuple(x.shape)} and a quantised weight of shape {shape}; the"
            " weight must be [outputs, inputs]"
        )
    out: Tensor = _Nf4Linear.apply(x, weight_MK)
    return out


class _Nf4Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_MK: Nf4) -> Tensor:
        # Not by save_for_backward: hooks of saved tensors would offload or copy a frozen weight.
        ctx.weight_MK = weight_MK
        return F.linear(x, dequantise(weight_MK, x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        weight_MK = dequantise(ctx.weight_MK, dout.dtype)
        rows = dout.reshape(-1, dout.shape[-1])
        return rows.mm(weight_MK).view(*dout.shape[:-1], weight_MK.shape[1]), None
