"""Matmuls whose inner dim is sharded over ranks, with their all-reduce and fused epilogues.

For inference: no backward. The sum runs over the ranks of ``group``; each rank adds its own bias
before the sum, as the fused operators do, so pass a bias on one rank only to add it once.

Source: MindSpeed's operator documentation, npu_mm_all_reduce_add_rms_norm and
npu_grouped_mat_mul_all_reduce.
"""

# K inner width on this rank, N outer width, ... leading dims

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.experts.group_lists import group_sizes
from ascend_run.ops.experts.quantised_matmul import antiquantised
from ascend_run.ops.kernels.forward_only import refuse_gradient


@attrs.frozen(eq=False, kw_only=True)
class Dequantisation:
    """Scales of quantised operands; no fields are set for floating-point operands."""

    dequant_scale: Tensor | None = None
    """Scale of the matmul of int8 rows and an int8 matrix: [1] or [N]."""
    antiquant_scale: Tensor | None = None
    """Scale of an int8 matrix with floating-point rows: [1], [N], or [ceil(K / group_size), N]."""
    antiquant_offset: Tensor | None = None
    """Added before the scale; of its shape."""
    group_size: int = 0
    """Rows of the matrix that share a scale; 0: all."""


WIDE = Dequantisation()


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
    """Compute ``y = all_reduce(x @ matrix + bias) + residual`` and ``y / rms(y) * gamma``.

    Args:
        x: [B, S, K] or [B * S, K]; the residual [B, S, N]. Floating, or int8 with a dequant scale.
        matrix_KN: Floating, or int8; may be a transposed view.
        bias_N: Bias of the matmul: int32 with a dequant scale.

    Returns:
        (y, normalised), both in the residual's shape and dtype.

    Numerics: matmul and norm in float32 (float64), y rounded in between as it is returned; integer
    matmuls in float64.

    Raises:
        RuntimeError: If a gradient is required.
    """
    refuse_gradient("mm_all_reduce_add_rms_norm", x, matrix_KN, residual, gamma_N, bias_N)
    wide = torch.promote_types(residual.dtype, torch.float32)
    product = dequantised_product(x, matrix_KN, bias_N, quantised, wide)
    y = product.to(residual.dtype).view(residual.shape)
    dist.all_reduce(y, group=group)
    y = y + residual
    y_wide = y.to(wide)
    inverse = (y_wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return y, (y_wide * inverse * gamma_N).to(residual.dtype)


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
    """Compute ``mm_all_reduce_add_rms_norm``; write y to the residual and return that."""
    y, normalised = mm_all_reduce_add_rms_norm(
        x, matrix_KN, residual, gamma_N, group, eps=eps, bias_N=bias_N, quantised=quantised
    )
    return residual.copy_(y), normalised


def dequantised_product(
    x: Tensor, matrix_KN: Tensor, bias_N: Tensor | None, how: Dequantisation, wide: torch.dtype
) -> Tensor:
    """Compute ``x @ matrix + bias`` of the dequantised operands."""
    if how.dequant_scale is not None:
        product = x.double() @ matrix_KN.double()
        with_bias = product if bias_N is None else product + bias_N
        return with_bias * how.dequant_scale.double()
    matrix = matrix_KN.to(wide)
    if how.antiquant_scale is not None:
        scales = (how.antiquant_scale, how.antiquant_offset)
        matrix = antiquantised(matrix_KN, *scales, wide, how.group_size)
    product = x.to(wide) @ matrix
    return product if bias_N is None else product + bias_N


def grouped_matmul_all_reduce(
    rows: Sequence[Tensor],
    matrices: Sequence[Tensor],
    group: dist.ProcessGroup,
    *,
    biases: Sequence[Tensor] | None = None,
    group_list: Sequence[int] | None = None,
    split_item: int = 0,
) -> list[Tensor]:
    """Compute ``all_reduce(rows_i @ matrix_i) + bias_i`` of every group in one all-reduce.

    Args:
        rows: One [T_i, K_i] a group with ``split_item`` 0 or 2; with 1 or 3 a single [T, K] of all
            groups, which ``group_list`` splits by cumulative sums.
        matrices: One [K_i, N_i] a group.
        biases: One [N_i] a group, the same on all ranks; added once.
        split_item: With 2 or 3 the groups' results are concatenated; all N_i are then equal.

    Returns:
        One tensor a group, or a list of the one tensor; in the dtype of the rows.

    Raises:
        ValueError: If the lists do not fit ``split_item``.
        RuntimeError: If a gradient is required.
    """
    refuse_gradient("grouped_matmul_all_reduce", *rows, *matrices, *(biases or ()))
    parts = split_rows(rows, len(matrices), group_list, split_item)
    products = [x @ matrix for x, matrix in zip(parts, matrices, strict=True)]
    return reduced_products(products, biases, split_item, group)


def split_rows(
    rows: Sequence[Tensor], groups: int, group_list: Sequence[int] | None, split_item: int
) -> Sequence[Tensor]:
    """Return the rows of each group."""
    single = split_item in (1, 3)
    if split_item not in (0, 1, 2, 3) or len(rows) != (1 if single else groups):
        raise ValueError(
            f"grouped_matmul_all_reduce: split_item={split_item} with {len(rows)} row tensors and "
            f"{groups} matrices; expected {groups} row tensors with 0 or 2, and 1 with 1 or 3"
        )
    if single != (group_list is not None):
        raise ValueError(
            f"grouped_matmul_all_reduce: split_item={split_item} "
            + ("needs a group_list" if single else "takes no group_list")
        )
    if group_list is None:
        return rows
    split: Sequence[Tensor] = rows[0].split(list(group_sizes(group_list, True, rows[0].shape[0])))
    return split


def reduced_products(
    products: Sequence[Tensor],
    biases: Sequence[Tensor] | None,
    split_item: int,
    group: dist.ProcessGroup,
) -> list[Tensor]:
    """All-reduce all results in one collective, and add their biases."""
    flat = torch.cat([product.reshape(-1) for product in products])
    dist.all_reduce(flat, group=group)
    sums = flat.split([product.numel() for product in products])
    results = [part.view(product.shape) for part, product in zip(sums, products, strict=True)]
    if biases is not None:
        pairs = zip(results, biases, strict=True)
        results = [(result + bias).to(result.dtype) for result, bias in pairs]
    return [torch.cat(results)] if split_item in (2, 3) else results
