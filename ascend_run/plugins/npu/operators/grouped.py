"""Products of groups of rows."""

# T tokens, N and K widths, X groups

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

_ROWS: Final = 0
_INNER: Final = 2
_UNGROUPED: Final = -1
"""``group_type`` of groups of rows, of the summed axis, and of tensors of their own."""
_A_TENSOR_EACH: Final = 0
_ONE_TENSOR: Final = 3
"""``split_item`` of an output a group, and of a single one."""


def grouped_matmul(
    x_TK: Tensor, matrices_XKN: Tensor, groups_X: Tensor, *, per_group: bool = False
) -> Tensor:
    """[T, N]: each row times the matrix of its group.

    Args:
        matrices_XKN: Contiguous, or a transposed view of a contiguous tensor.
        groups_X: Running totals of the groups' rows, int64; each group's own where ``per_group``.
    """
    (y,) = torch.ops.npu.npu_grouped_matmul(
        [x_TK],
        [matrices_XKN],
        group_list=groups_X,
        split_item=_ONE_TENSOR,
        group_type=_ROWS,
        group_list_type=int(per_group),
    )
    return y


def grouped_outer(
    a_NT: Tensor, b_TK: Tensor, groups_X: Tensor, *, per_group: bool = False
) -> Tensor:
    """[X, N, K]: the product over the rows of each group, ``a`` being a transposed view."""
    (y,) = torch.ops.npu.npu_grouped_matmul(
        [a_NT],
        [b_TK],
        group_list=groups_X,
        split_item=_ONE_TENSOR,
        group_type=_INNER,
        group_list_type=int(per_group),
    )
    return y


def grouped_matmul_add_(sum_XNK: Tensor, a_TN: Tensor, b_TK: Tensor, ends_X: Tensor) -> None:
    """Add ``a.T @ b`` over the rows of each group to a float32 sum, in place.

    Args:
        a_TN: float16 or bfloat16, as b; the operator transposes it.
        ends_X: Running totals, int64, which every release of the operator takes.
    """
    torch.ops.npu.npu_grouped_matmul_add_(sum_XNK, a_TN, b_TK, ends_X)


def matmuls(rows: Sequence[Tensor], matrices: Sequence[Tensor]) -> list[Tensor]:
    """``rows_i @ matrix_i``, whatever their sizes."""
    return torch.ops.npu.npu_grouped_matmul(
        list(rows), list(matrices), split_item=_A_TENSOR_EACH, group_type=_UNGROUPED
    )
