"""Grouped GEMMs whose partition is a group list: cumulative sums, or the rows of each group.

Megatron's experts have their counts on the host and use ``grouped_matmul``; these are the variants
of the operators npu_gmm (cumulative sums), npu_gmm_v2 (rows of each group) and
npu_groupmatmul_add_fp32, whose list may be on the device. Reading it on the host synchronises with
the device.

Source: MindSpeed's operator documentation, gmm and npu_groupmatmul_add_fp32.
"""

# T rows of all groups, X groups, K and N inner and outer widths of the matrices

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ascend_run.ops.autograd_function import Function
from ascend_run.types.moe import GroupedGemm

from .grouped_matmul import GROUPS, choose, grouped_matmul

GroupList = Tensor | Sequence[int]


def group_sizes(group_list: GroupList, cumulative: bool, num_rows: int) -> tuple[int, ...]:
    """Return the rows of each group, on the host.

    Raises:
        ValueError: If a group's row count is negative, or if they do not sum to ``num_rows``.
    """
    entries = group_list.tolist() if isinstance(group_list, Tensor) else list(group_list)
    sizes = tuple(b - a for a, b in pairwise([0, *entries])) if cumulative else tuple(entries)
    if any(size < 0 for size in sizes) or sum(sizes) != num_rows:
        kind = "cumulative sums" if cumulative else "rows of each group"
        expected = "nondecreasing and end with" if cumulative else "nonnegative and sum to"
        raise ValueError(f"group list {entries} ({kind}): entries must be {expected} {num_rows}")
    return sizes


def listed_grouped_matmul(
    x_TK: Tensor,
    matrices_XKN: Tensor,
    group_list: GroupList,
    *,
    cumulative: bool,
    bias_XN: Tensor | None = None,
) -> Tensor:
    """Multiply each row by the matrix of its group and add the group's bias; returns [T, N].

    Args:
        matrices_XKN: Any strides, including transposed views.
        group_list: X entries, int64 if a tensor.
        cumulative: Whether they are cumulative sums (npu_gmm) or rows of each group (npu_gmm_v2).

    Differentiable in x, matrices and bias; an empty group's matrix has a gradient of zeros.
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
    """Compute ``a.T @ b`` over the rows of each group, [X, N, K] (``group_type`` 2); zeros if
    empty.

    Differentiable in both.
    """
    sizes = group_sizes(group_list, cumulative, a_TN.shape[0])
    widths = (a_TN.shape[1], b_TK.shape[1])
    backend = choose(sizes, a_TN.device, a_TN.dtype, widths)
    out: Tensor = _GroupedOuter.apply(a_TN, b_TK, GROUPS[backend](sizes, a_TN.device))
    return out


class _GroupedOuter(Function):
    @staticmethod
    def forward(ctx: Any, a_TN: Tensor, b_TK: Tensor, groups: GroupedGemm) -> Tensor:
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
    """Add ``a.T @ b`` of each group to a float32 sum, in place, and return the sum.

    Accumulates the gradient of experts' weights into ``main_grad``. Has no backward.

    Shapes and dtypes: sum [X, N, K] float32 (float64), contiguous or a view; a and b of one dtype,
    half precision included.
    Numerics: matmuls run in the dtype of the sum, without intermediate rounding.
    """
    sizes = group_sizes(group_list, cumulative, a_TN.shape[0])
    parts = zip(a_TN.split(sizes), b_TK.split(sizes), sum_XNK.unbind(0), strict=True)
    for a, b, total in parts:
        total.addmm_(a.to(total.dtype).t(), b.to(total.dtype))
    return sum_XNK
