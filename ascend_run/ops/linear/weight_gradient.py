"""The gradient of a linear's weight, accumulated into data parallelism's buffer.

Source: Megatron-LM's gradient accumulation fusion.
"""

# T rows of all tokens, N and K outer and inner width of the weight

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import torch
from torch import Tensor

from ascend_run.ops.tensor_marks import mark

from .wide_matmul import Matmul

MatmulAdd: TypeAlias = Callable[[Tensor, Tensor, Tensor], None]
PRODUCT_BYTES: Final = 2 * 2**20
"""Of a product that a CPU adds to a sum in another dtype, at a time: what its caches hold."""


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


def plus_product(
    sum_NK: Tensor | None, a_TN: Tensor, b_TK: Tensor, dtype: torch.dtype, matmul: Matmul = torch.mm
) -> Tensor:
    """Return ``sum + a.T @ b``, in place if there is a sum.

    Args:
        dtype: Of the sum; that of a and b or a wider one.

    Numerics: with a wider sum each product is rounded to a's dtype. A CPU multiplies by blocks of
    rows then, so that a block is added while it is in the cache; that takes less than half the time
    of the whole product's sum.
    """
    if dtype == a_TN.dtype:
        return matmul(a_TN.t(), b_TK) if sum_NK is None else sum_NK.addmm_(a_TN.t(), b_TK)
    num_rows, width = a_TN.shape[1], b_TK.shape[1]
    if sum_NK is None:
        sum_NK = a_TN.new_zeros((num_rows, width), dtype=dtype)
    is_cpu = sum_NK.device.type == "cpu"
    size = max(1, PRODUCT_BYTES // (a_TN.itemsize * width) if is_cpu else num_rows)
    for start in range(0, num_rows, size):
        rows = slice(start, start + size)
        sum_NK[rows].add_(matmul(a_TN[:, rows].t(), b_TK))
    return sum_NK


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
