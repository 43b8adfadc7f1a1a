"""Grouped matmuls."""

# T tokens, N and K widths, X groups

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

_ROWS: Final = 0
_INNER: Final = 2
_UNGROUPED: Final = -1
"""``group_type`` for groups of rows, for groups of the reduced axis, and for separate tensors."""
_A_TENSOR_EACH: Final = 0
_ONE_TENSOR: Final = 3
"""``split_item`` for one output per group, and for a single output."""


def grouped_matmul(
    x_TK: Tensor, matrices_XKN: Tensor, groups_X: Tensor, *, per_group: bool = False
) -> Tensor:
    """Multiply each row by the matrix of its group: [T, N].

    Args:
        matrices_XKN: Contiguous, or a transposed view of a contiguous tensor.
        groups_X: Cumulative rows of the groups, int64; rows of each group with ``per_group``.
    """
    (y,) = torch.ops.npu.npu_grouped_matmul(
        [x_TK],
        [matrices_XKN],
        group_list=groups_X,
        split_item=_ONE_TENSOR,
        group_type=_ROWS,
        group_list_type=int(per_group),
    )
    out: Tensor = y
    return out


def grouped_outer(
    a_NT: Tensor, b_TK: Tensor, groups_X: Tensor, *, per_group: bool = False
) -> Tensor:
    """Compute ``a @ b`` over the rows of each group, [X, N, K]; ``a`` is a transposed view."""
    (y,) = torch.ops.npu.npu_grouped_matmul(
        [a_NT],
        [b_TK],
        group_list=groups_X,
        split_item=_ONE_TENSOR,
        group_type=_INNER,
        group_list_type=int(per_group),
    )
    out: Tensor = y
    return out


def grouped_matmul_add_(sum_XNK: Tensor, a_TN: Tensor, b_TK: Tensor, ends_X: Tensor) -> None:
    """Add ``a.T @ b`` over the rows of each group to a float32 sum, in place.

    Args:
        a_TN: float16 or bfloat16, as b; the operator transposes it.
        ends_X: Cumulative rows, int64, which every release of the operator takes.
    """
    torch.ops.npu.npu_grouped_matmul_add_(sum_XNK, a_TN, b_TK, ends_X)


def matmuls(rows: Sequence[Tensor], matrices: Sequence[Tensor]) -> list[Tensor]:
    """Compute ``rows_i @ matrix_i`` for matrices of any sizes."""
    result: list[Tensor] = torch.ops.npu.npu_grouped_matmul(
        list(rows), list(matrices), split_item=_A_TENSOR_EACH, group_type=_UNGROUPED
    )
    return result
