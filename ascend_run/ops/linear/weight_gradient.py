"""The gradient of a linear's weight, accumulated into data parallelism's buffer.

Source: Megatron-LM's gradient accumulation fusion.
"""

# T rows of all tokens, N and K outer and inner width of the weight

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from ascend_run.ops.tensor_marks import mark

from .wide_matmul import Matmul

MatmulAdd: TypeAlias = Callable[[Tensor, Tensor, Tensor], None]


def matmul_add_fp32(sum_NK: Tensor, a_TN: Tensor, b_TK: Tensor) -> None:
    """Compute ``sum += a.T @ b`` in one kernel.

    Shapes and dtypes: a and b of one dtype; the sum in that or a wider one, changed in place.
    Numerics: the matmul accumulates in the sum's dtype, where a separate matmul would first round
    to a's.
    """
    if sum_NK.dtype == a_TN.dtype:
        sum_NK.addmm_(a_TN.t(), b_TK)
    elif sum_NK.device.type == "cuda" and sum_NK.dtype == torch.float32:
        torch.addmm(sum_NK, a_TN.t(), b_TK, out_dtype=torch.float32, out=sum_NK)
    else:
        sum_NK.addmm_(a_TN.t().to(sum_NK.dtype), b_TK.to(sum_NK.dtype))


def weight_gradient(
    weight: Tensor,
    dy_TN: Tensor,
    x_TK: Tensor,
    matmul_add: MatmulAdd | None,
    matmul: Matmul = torch.mm,
) -> Tensor:
    """Return the gradient of a weight [N, K], or an empty tensor if it was added to its
    ``main_grad``.

    Megatron's data parallelism sets ``main_grad`` on parameters that it reduces. It reads the mark
    set here and then drops the tensor without adding it; the tensor's presence signals that the
    gradient is ready.

    Args:
        matmul_add: Adds the gradient to ``main_grad``; None leaves that to data parallelism.
        matmul: Computes the gradient as a separate tensor.
    """
    main_grad: Tensor | None = getattr(weight, "main_grad", None) if matmul_add else None
    if main_grad is None or matmul_add is None:
        return matmul(dy_TN.t(), x_TK)
    matmul_add(main_grad, dy_TN, x_TK)
    mark(weight, grad_added_to_main_grad=True)
    # The buffer of a tied embedding adds the returned tensor to what was accumulated.
    make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
    return make(weight)
