"""The gradient of a linear's weight, summed where data parallelism keeps it.

Source: Megatron-LM's gradient accumulation fusion.
"""

# T rows of all tokens, N and K outer and inner width of the weight

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

MatmulAdd: TypeAlias = Callable[[Tensor, Tensor, Tensor], None]


def matmul_add_fp32(sum_NK: Tensor, a_TN: Tensor, b_TK: Tensor) -> None:
    """``sum += a.T @ b`` in one kernel.

    Shapes and dtypes: a and b of one dtype; the sum in that or a wider one, changed in place.
    Numerics: the product is summed and added in the sum's dtype, where a product of its own would
    be rounded to a's first.
    """
    if sum_NK.dtype == a_TN.dtype:
        sum_NK.addmm_(a_TN.t(), b_TK)
    elif sum_NK.device.type == "cuda" and sum_NK.dtype == torch.float32:
        torch.addmm(sum_NK, a_TN.t(), b_TK, out_dtype=torch.float32, out=sum_NK)
    else:
        sum_NK.addmm_(a_TN.t().to(sum_NK.dtype), b_TK.to(sum_NK.dtype))


def weight_gradient(
    weight: Tensor, dy_TN: Tensor, x_TK: Tensor, matmul_add: MatmulAdd | None
) -> Tensor:
    """The gradient of a weight [N, K]; or, where it was added to its ``main_grad``, a tensor
    without values.

    Megatron's data parallelism gives a parameter that it reduces a ``main_grad``. It reads the mark
    that is left here, adds nothing then and drops the tensor; that there is one tells it that the
    gradient has come.

    Args:
        matmul_add: How it is added there; None leaves that to who reduces.
    """
    main_grad: Tensor | None = getattr(weight, "main_grad", None) if matmul_add else None
    if main_grad is None or matmul_add is None:
        return dy_TN.t() @ x_TK
    matmul_add(main_grad, dy_TN, x_TK)
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    # Of a tied embedding the buffer takes what comes, beside what was added to it.
    make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
    return make(weight)
