"""Matmuls all-reduced over ranks, and the norm that follows."""

# K inner width on this rank, N outer width

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.kernels.forward_only import refuse_gradient
from ascend_run.ops.linear import reduced_matmul as torch_form
from ascend_run.ops.linear.reduced_matmul import WIDE, Dequantisation
from ascend_run.plugins.platforms.npu import communicators
from ascend_run.plugins.platforms.npu.operators import grouped, norm
from ascend_run.plugins.platforms.npu.operators import reduced as operators
from ascend_run.plugins.platforms.npu.operators.quantised import trans_quant_param


def mm_all_reduce_add_rms_norm(
    x: Tensor,
    matrix_KN: Tensor,
    residual: Tensor,
    gamma_N: Tensor,
    group: dist.ProcessGroup,
    *,
    eps: float = 1e-6,
    bias_N: Tensor | None = None,
    quantised: Dequantisation = WIDE,
) -> tuple[Tensor, Tensor]:
    """Implement ``ops.linear.reduced_matmul.mm_all_reduce_add_rms_norm``.

    One operator for matmul and all-reduce, then one for addition and norm.
    """
    refuse_gradient("mm_all_reduce_add_rms_norm", x, matrix_KN, residual, gamma_N, bias_N)
    product = operators.mm_all_reduce(
        x.contiguous(),
        matrix_KN,
        communicators.communicator_name(group),
        bias_N=bias_N,
        dequant_scale=_encoded(quantised.dequant_scale, residual.dtype),
        antiquant_scale=quantised.antiquant_scale,
        antiquant_offset=quantised.antiquant_offset,
        antiquant_group_size=quantised.group_size,
    )
    normalised, _, y = norm.add_rms_norm(product.view(residual.shape), residual, gamma_N, eps)
    return y, normalised


def mm_all_reduce_add_rms_norm_(
    x: Tensor,
    matrix_KN: Tensor,
    residual: Tensor,
    gamma_N: Tensor,
    group: dist.ProcessGroup,
    *,
    eps: float = 1e-6,
    bias_N: Tensor | None = None,
    quantised: Dequantisation = WIDE,
) -> tuple[Tensor, Tensor]:
    """Implement ``ops.linear.reduced_matmul.mm_all_reduce_add_rms_norm_``."""
    y, normalised = mm_all_reduce_add_rms_norm(
        x, matrix_KN, residual, gamma_N, group, eps=eps, bias_N=bias_N, quantised=quantised
    )
    return residual.copy_(y), normalised


def _encoded(scale: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the dequantisation scale: bfloat16 for a bfloat16 output, encoded for float16."""
    if scale is None or dtype is torch.bfloat16:
        return scale if scale is None else scale.to(torch.bfloat16)
    return trans_quant_param(scale)


def grouped_matmul_all_reduce(
    rows: Sequence[Tensor],
    matrices: Sequence[Tensor],
    group: dist.ProcessGroup,
    *,
    biases: Sequence[Tensor] | None = None,
    group_list: Sequence[int] | None = None,
    split_item: int = 0,
) -> list[Tensor]:
    """Implement ``ops.linear.reduced_matmul.grouped_matmul_all_reduce``.

    All matmuls run in one call, followed by one all-reduce.
    """
    refuse_gradient("grouped_matmul_all_reduce", *rows, *matrices, *(biases or ()))
    parts = torch_form.split_rows(rows, len(matrices), group_list, split_item)
    filled = [i for i, part in enumerate(parts) if part.shape[0]]
    products = [x.new_empty(0, m.shape[1]) for x, m in zip(parts, matrices, strict=True)]
    if filled:
        rows_of = [parts[i].contiguous() for i in filled]
        made = grouped.matmuls(rows_of, [matrices[i] for i in filled])
        for i, product in zip(filled, made, strict=True):
            products[i] = product
    return torch_form.reduced_products(products, biases, split_item, group)
