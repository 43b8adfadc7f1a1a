"""Grouped matmuls with group lists that stay on the device: no synchronization.

A list on the host is validated as the torch implementation does; one on the device is not
validated. What the operator writes for a group without rows is not documented; it is zeroed.
"""

# T rows of all groups, X groups, K and N inner and outer widths of the matrices

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ascend_run.ops.autograd_function import Function
from ascend_run.ops.experts import group_lists as torch_form
from ascend_run.ops.experts.group_lists import GroupList, group_sizes
from ascend_run.plugins.platforms.npu.operators import grouped as operators


def listed_grouped_matmul(
    x_TK: Tensor,
    matrices_XKN: Tensor,
    group_list: GroupList,
    *,
    cumulative: bool,
    bias_XN: Tensor | None = None,
) -> Tensor:
    """Implement ``ops.experts.group_lists.listed_grouped_matmul``.

    The bias is added by torch, since the operator's has no gradient.
    """
    if x_TK.shape[0] == 0:
        return torch_form.listed_grouped_matmul(
            x_TK, matrices_XKN, group_list, cumulative=cumulative, bias_XN=bias_XN
        )
    groups_X = on_device(group_list, cumulative, x_TK)
    y: Tensor = _Matmul.apply(x_TK, matrices_XKN, groups_X, not cumulative)
    if bias_XN is None:
        return y
    sizes_X = _sizes(groups_X, not cumulative)
    return y + bias_XN.repeat_interleave(sizes_X, dim=0, output_size=x_TK.shape[0])


def listed_grouped_outer(
    a_TN: Tensor, b_TK: Tensor, group_list: GroupList, *, cumulative: bool
) -> Tensor:
    """Implement ``ops.experts.group_lists.listed_grouped_outer``."""
    if a_TN.shape[0] == 0:
        return torch_form.listed_grouped_outer(a_TN, b_TK, group_list, cumulative=cumulative)
    out: Tensor = _Outer.apply(a_TN, b_TK, on_device(group_list, cumulative, a_TN), not cumulative)
    return out


@torch.no_grad()
def grouped_matmul_add_(
    sum_XNK: Tensor, a_TN: Tensor, b_TK: Tensor, group_list: GroupList, *, cumulative: bool
) -> Tensor:
    """Implement ``ops.experts.group_lists.grouped_matmul_add_``.

    Fused for half precisions and a float32 sum.
    """
    if a_TN.shape[0] == 0:
        return torch_form.grouped_matmul_add_(
            sum_XNK, a_TN, b_TK, group_list, cumulative=cumulative
        )
    groups_X = on_device(group_list, cumulative, a_TN)
    if a_TN.dtype in (torch.bfloat16, torch.float16) and sum_XNK.dtype is torch.float32:
        ends_X = groups_X if cumulative else groups_X.cumsum(0)
        operators.grouped_matmul_add_(sum_XNK, a_TN.contiguous(), b_TK.contiguous(), ends_X)
        return sum_XNK
    return sum_XNK.add_(_outer(a_TN, b_TK, groups_X, not cumulative))


def on_device(group_list: GroupList, cumulative: bool, rows: Tensor) -> Tensor:
    """Return the list as int64 on the device, as the operators take it."""
    if isinstance(group_list, Tensor) and group_list.device == rows.device:
        return group_list.to(torch.int64)
    group_sizes(group_list, cumulative, rows.shape[0])
    entries = torch.as_tensor(group_list, dtype=torch.int64)
    return entries.to(rows.device, non_blocking=True)


def _sizes(groups_X: Tensor, per_group: bool) -> Tensor:
    return groups_X if per_group else groups_X.diff(prepend=groups_X.new_zeros(1))


def _outer(a_TN: Tensor, b_TK: Tensor, groups_X: Tensor, per_group: bool) -> Tensor:
    products = operators.grouped_outer(
        a_TN.contiguous().t(), b_TK.contiguous(), groups_X, per_group=per_group
    )
    return products.masked_fill_((_sizes(groups_X, per_group) == 0)[:, None, None], 0.0)


class _Matmul(Function):
    @staticmethod
    def forward(
        ctx: Any, x_TK: Tensor, matrices_XKN: Tensor, groups_X: Tensor, per_group: bool
    ) -> Tensor:
        ctx.save_for_backward(x_TK, matrices_XKN, groups_X)
        ctx.per_group = per_group
        return operators.grouped_matmul(
            x_TK.contiguous(), matrices_XKN, groups_X, per_group=per_group
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_TK, matrices_XKN, groups_X = ctx.saved_tensors
        dx = dmatrices = None
        if ctx.needs_input_grad[0]:
            dx = operators.grouped_matmul(
                dy_TN.contiguous(), matrices_XKN.mT, groups_X, per_group=ctx.per_group
            )
        if ctx.needs_input_grad[1]:
            dmatrices = _outer(x_TK, dy_TN, groups_X, ctx.per_group)
        return dx, dmatrices, None, None


class _Outer(Function):
    @staticmethod
    def forward(ctx: Any, a_TN: Tensor, b_TK: Tensor, groups_X: Tensor, per_group: bool) -> Tensor:
        ctx.save_for_backward(a_TN, b_TK, groups_X)
        ctx.per_group = per_group
        return _outer(a_TN, b_TK, groups_X, per_group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_XNK: Tensor) -> tuple[Tensor, Tensor, None, None]:
        a_TN, b_TK, groups_X = ctx.saved_tensors
        dy_XNK = dy_XNK.contiguous()
        per_group = ctx.per_group
        da = operators.grouped_matmul(b_TK.contiguous(), dy_XNK.mT, groups_X, per_group=per_group)
        db = operators.grouped_matmul(a_TN.contiguous(), dy_XNK, groups_X, per_group=per_group)
        return da, db, None, None
