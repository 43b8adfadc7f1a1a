"""Linears by fused operators; unsupported arguments use the torch implementation."""

# T rows, P ranks, K inner and N outer width

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.linear import collective_matmul as ring
from ascend_run.ops.linear import weight_gradient
from ascend_run.plugins.platforms.npu import communicators
from ascend_run.plugins.platforms.npu.operators import linear as operators
from ascend_run.plugins.platforms.npu.operators.grouped import grouped_matmul_add_
from ascend_run.plugins.platforms.npu.operators.reduced import mm_all_reduce

HALF: Final = (torch.bfloat16, torch.float16)
INNER: Final = range(256, 65535)
"""Inner widths that the fused all-gather and reduce-scatter matmuls take."""
GROUP_SIZES: Final = (2, 4, 8, 16)
WIDTHS: Final = range(1, 65536)
"""Last dimensions that the accumulating matmul takes."""


def matmul_add_fp32(sum_NK: Tensor, a_TN: Tensor, b_TK: Tensor) -> None:
    """Implement ``ops.linear.weight_gradient.matmul_add_fp32``.

    It is the accumulating grouped matmul, with one group.
    """
    takes = a_TN.dtype in HALF and sum_NK.dtype is torch.float32 and a_TN.shape[0] > 0
    if not takes or a_TN.shape[1] not in WIDTHS or b_TK.shape[1] not in WIDTHS:
        weight_gradient.matmul_add_fp32(sum_NK, a_TN, b_TK)
        return
    end = torch.tensor([a_TN.shape[0]], dtype=torch.int64).to(a_TN.device, non_blocking=True)
    grouped_matmul_add_(sum_NK.unsqueeze(0), a_TN, b_TK, end)


def all_gather_matmul(
    x_TK: Tensor, matrix_KN: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Implement ``ops.linear.collective_matmul.all_gather_matmul``."""
    if not _takes(matrix_KN, group):
        return ring.all_gather_matmul(x_TK, matrix_KN, group)
    name = communicators.communicator_name(group)
    return operators.all_gather_matmul(x_TK.contiguous(), matrix_KN, name, group.size())


def matmul_reduce_scatter(x_PTK: Tensor, matrix_KN: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Implement ``ops.linear.collective_matmul.matmul_reduce_scatter``."""
    if not _takes(matrix_KN, group):
        return ring.matmul_reduce_scatter(x_PTK, matrix_KN, group)
    name = communicators.communicator_name(group)
    return operators.matmul_reduce_scatter(x_PTK.contiguous(), matrix_KN, name, group.size())


def matmul_all_reduce(x_TK: Tensor, matrix_KN: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Implement ``ops.linear.collective_matmul.matmul_all_reduce``."""
    if x_TK.shape[0] == 0 or group.size() not in GROUP_SIZES:
        return ring.matmul_all_reduce(x_TK, matrix_KN, group)
    name = communicators.communicator_name(group)
    return mm_all_reduce(x_TK.contiguous(), matrix_KN, name)


def _takes(matrix_KN: Tensor, group: dist.ProcessGroup) -> bool:
    return matrix_KN.shape[0] in INNER and group.size() in GROUP_SIZES
