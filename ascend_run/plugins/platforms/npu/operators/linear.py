"""Matmuls of tensor-parallel linears fused with their collective."""

# T rows of one rank, P ranks, K inner and N outer width

from __future__ import annotations

import torch
from torch import Tensor


def all_gather_matmul(
    x_TK: Tensor, matrix_KN: Tensor, communicator: str, num_ranks: int
) -> tuple[Tensor, Tensor]:
    """Return (all ranks' rows times the matrix [P * T, N], all ranks' rows [P * T, K]).

    Args:
        x_TK: Contiguous.
        matrix_KN: Contiguous, or a transposed view of a contiguous tensor.
        communicator: hccl's name of the group.
    """
    product, gathered = torch.ops.npu.npu_all_gather_base_mm(
        x_TK, matrix_KN, communicator, num_ranks, gather_index=0, gather_output=True
    )
    return product, gathered


def matmul_reduce_scatter(
    x_PTK: Tensor, matrix_KN: Tensor, communicator: str, num_ranks: int
) -> Tensor:
    """Return this rank's rows of the sum of all ranks' matmuls, [T, N]; arguments as above."""
    out: Tensor = torch.ops.npu.npu_mm_reduce_scatter_base(
        x_PTK, matrix_KN, communicator, num_ranks, reduce_op="sum"
    )
    return out
