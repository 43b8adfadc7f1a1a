"""All-reduced matmuls, as documented. The communicator ``hccl`` has all ranks here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from .quantised import decoded


def npu_mm_all_reduce_base(
    x1: Tensor,
    x2: Tensor,
    hcom: str,
    *,
    reduce_op: str = "sum",
    bias: Tensor | None = None,
    antiquant_scale: Tensor | None = None,
    antiquant_offset: Tensor | None = None,
    dequant_scale: Tensor | None = None,
    antiquant_group_size: int = 0,
    comm_turn: int = 0,
    **options: Any,
) -> Tensor:
    assert not any(options.values()), f"not written down here: {options}"
    assert (reduce_op, comm_turn) == ("sum", 0)
    assert x1.dim() in (2, 3)
    assert x2.dim() == 2
    assert x1.is_contiguous()
    assert bias is None or bias.shape == (x2.shape[1],)
    wide, dtype = torch.float64, x1.dtype
    matrix = x2.to(wide)
    if antiquant_scale is not None:
        assert x2.dtype is torch.int8
        assert antiquant_offset is None or antiquant_offset.shape == antiquant_scale.shape
        owner: Any = slice(None)
        if antiquant_group_size:
            assert antiquant_scale.shape[0] == -(-x2.shape[0] // antiquant_group_size)
            owner = torch.arange(x2.shape[0]) // antiquant_group_size
        if antiquant_offset is not None:
            matrix = matrix + antiquant_offset[owner].to(wide)
        matrix = matrix * antiquant_scale[owner].to(wide)
    product = x1.to(wide) @ matrix
    if bias is not None:
        product = product + bias
    if dequant_scale is not None:
        assert x1.dtype is x2.dtype is torch.int8
        assert dequant_scale.dtype in (torch.int64, torch.bfloat16)
        product = product * decoded(dequant_scale)
        dtype = torch.bfloat16 if dequant_scale.dtype is torch.bfloat16 else torch.float16
    summed = product.to(dtype)
    assert hcom == "hccl"
    dist.all_reduce(summed)
    return summed
