"""Grouped products whose partition is a list: of running totals, or of each group's rows.

Megatron's experts know their counts on the host and take ``grouped_matmul``; these are the forms of
the operators npu_gmm (running totals), npu_gmm_v2 (each group's rows) and npu_groupmatmul_add_fp32,
whose list may stand on the device. Here it is read on the host, which waits for the device.

Source: MindSpeed's operator documentation, gmm and npu_groupmatmul_add_fp32.
"""

# T rows of all groups, X groups, K and N inner and outer widths of the matrices

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .grouped_matmul import GROUPS, Groups, choose, grouped_matmul

GroupList = Tensor | Sequence[int]


def group_sizes(group_list: GroupList, cumulative: bool, num_rows: int) -> tuple[int, ...]:
    """Rows of each group, on the host.

    Raises:
        ValueError: A group has fewer than no rows, or all together have not ``num_rows``.
    """
    entries = group_list.tolist() if isinstance(group_list, Tensor) else list(group_list)
    sizes = tuple(b - a for a, b in pairwise([0, *entries])) if cumulative else tuple(entries)
    if any(size < 0 for size in sizes) or sum(sizes) != num_rows:
        kind = "running totals" if cumulative else "rows of each group"
        expected = "never falls and ends with" if cumulative else "is never negative and sums to"
        raise ValueError(f"group list {entries} ({kind}): expected one that {expected} {num_rows}")
    return sizes


def listed_grouped_matmul(
    x_TK: Tensor,
    matrices_XKN: Tensor,
    group_list: GroupList,
    *,
    cumulative: bool,
    bias_XN: Tensor | None = None,
) -> Tensor:
    """[T, N]: each row times the matrix of its group, plus the group's bias.

    Args:
        matrices_XKN: Any strides, a transposed view too.
        group_list: X entries, int64 where a tensor.
        cumulative: Whether they are running totals (npu_gmm), not each group's rows (npu_gmm_v2).

    Differentiable in x, matrices and bias; an empty group's matrix receives zeros.
    """
    sizes = group_sizes(group_list, cumulative, x_TK.shape[0])
    y = grouped_matmul(x_TK, matrices_XKN.transpose(1, 2), sizes)
    if bias_XN is None:
        return y
    repeats = torch.tensor(sizes, device=x_TK.device)
    return y + bias_XN.repeat_interleave(repeats, dim=0, output_size=x_TK.shape[0])


def listed_grouped_outer(
    a_TN: Tensor, b_TK: Tensor, group_list: GroupList, *, cumulative: bool
) -> Tensor:
    """[X, N, K]: ``a.T @ b`` over the rows of each group (``group_type`` 2); zeros without rows.

    Differentiable in both.
    """
    sizes = group_sizes(group_list, cumulative, a_TN.shape[0])
    widths = (a_TN.shape[1], b_TK.shape[1])
    backend = choose(sizes, a_TN.device, a_TN.dtype, widths)
    return _GroupedOuter.apply(a_TN, b_TK, GROUPS[backend](sizes, a_TN.device))


class _GroupedOuter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a_TN: Tensor, b_TK: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        ctx.save_for_backward(a_TN, b_TK)
        return groups.outer(a_TN, b_TK)

    @staticmethod
    def backward(ctx: Any, dy_XNK: Tensor) -> tuple[Tensor, Tensor, None]:
        a_TN, b_TK = ctx.saved_tensors
        da = ctx.groups.matmul(b_TK, dy_XNK.transpose(1, 2))
        db = ctx.groups.matmul(a_TN, dy_XNK.contiguous())
        return da, db, None


@torch.no_grad()
def grouped_matmul_add_(
    sum_XNK: Tensor, a_TN: Tensor, b_TK: Tensor, group_list: GroupList, *, cumulative: bool
) -> Tensor:
    """Add ``a.T @ b`` of each group to a float32 sum, in place, and give the sum back.

    The gradient of experts' weights, added to ``main_grad``. No backward: it is one.

    Shapes and dtypes: sum [X, N, K] float32 (float64), contiguous or a view; a and b of one dtype,
    half precisions included.
    Numerics: the products are taken in the dtype of the sum, so nothing is rounded in between.
    """
    sizes = group_sizes(group_list, cumulative, a_TN.shape[0])
    parts = zip(a_TN.split(sizes), b_TK.split(sizes), sum_XNK.unbind(0), strict=True)
    for a, b, total in parts:
        total.addmm_(a.to(total.dtype).t(), b.to(total.dtype))
    return sum_XNK
