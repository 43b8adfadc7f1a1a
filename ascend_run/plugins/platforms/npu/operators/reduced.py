"""Matmuls that are all-reduced over ranks."""

# K inner width on this rank, N outer width

from __future__ import annotations

import torch
from torch import Tensor


def mm_all_reduce(
    x: Tensor,
    matrix_KN: Tensor,
    communicator: str,
    *,
    bias_N: Tensor | None = None,
    dequant_scale: Tensor | None = None,
    antiquant_scale: Tensor | None = None,
    antiquant_offset: Tensor | None = None,
    antiquant_group_size: int = 0,
) -> Tensor:
    """Compute ``x @ matrix + bias`` on every rank and all-reduce it, [..., N].

    Args:
        x: [M, K] or [B, S, K]; float16 or bfloat16, or int8 with a dequant scale.
        communicator: hccl's name of the group.
        dequant_scale: For the matmul of int8 operands: bfloat16 for a bfloat16 result, encoded
            int64 for float16.
        antiquant_scale: For an int8 matrix with rows that are not quantised.
    """
    out: Tensor = torch.ops.npu.npu_mm_all_reduce_base(
        x,
        matrix_KN,
        communicator,
        reduce_op="sum",
        bias=bias_N,
        antiquant_scale=antiquant_scale,
        antiquant_offset=antiquant_offset,
        dequant_scale=dequant_scale,
        antiquant_group_size=antiquant_group_size,
    )
    return out
