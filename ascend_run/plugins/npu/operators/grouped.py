"""Products of groups of rows."""

# T tokens, N and K widths, X groups

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_CUMULATIVE: Final = 0
_ROWS: Final = 0
_INNER: Final = 2
_ONE_TENSOR: Final = 3
"""``group_list_type`` of running totals; ``group_type`` of groups of rows and of the summed axis;
``split_item`` of a single output."""


def grouped_matmul(x_TK: Tensor, matrices_XKN: Tensor, ends_X: Tensor) -> Tensor:
    """[T, N]: each row times the matrix of its group.

    Args:
        matrices_XKN: Contiguous, or a transposed view of a contiguous tensor.
        ends_X: Running totals of the groups' rows, int64.
    """
    (y,) = torch.ops.npu.npu_grouped_matmul(
        [x_TK],
        [matrices_XKN],
        group_list=ends_X,
        split_item=_ONE_TENSOR,
        group_type=_ROWS,
        group_list_type=_CUMULATIVE,
    )
    return y


def grouped_outer(a_NT: Tensor, b_TK: Tensor, ends_X: Tensor) -> Tensor:
    """[X, N, K]: the product over the rows of each group, ``a`` being a transposed view."""
    (y,) = torch.ops.npu.npu_grouped_matmul(
        [a_NT],
        [b_TK],
        group_list=ends_X,
        split_item=_ONE_TENSOR,
        group_type=_INNER,
        group_list_type=_CUMULATIVE,
    )
    return y
