"""All-reduced matmuls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import distributed as dist

from ascend_run.plugins.platforms.npu.operators import reduced as operators
from ascend_run.plugins.platforms.npu.operators.quantised import trans_quant_param

from .draws import B, D, H, S, draw, integers

NAME = "hccl"


@contextmanager
def alone(device: torch.device) -> Iterator[None]:
    """Create a group of this process alone, if there is none."""
    if device.type == "meta" or dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def wide(device: torch.device, *, axes: int, bias: bool) -> Any:
    x = draw(device, *((S, B, H) if axes == 3 else (S * B, H)), dtype=torch.bfloat16)
    matrix = draw(device, H, D, dtype=torch.bfloat16)
    added = draw(device, D, dtype=torch.bfloat16) if bias else None
    with alone(device):
        return operators.mm_all_reduce(x, matrix, NAME, bias_N=added)


def dequantised(device: torch.device, *, dtype: torch.dtype, bias: bool) -> Any:
    scale = draw(device, D)
    encoded = trans_quant_param(scale) if dtype is torch.float16 else scale.bfloat16()
    x, matrix = integers(device, S, B, H), integers(device, H, D)
    added = integers(device, D).int() if bias else None
    with alone(device):
        return operators.mm_all_reduce(x, matrix, NAME, bias_N=added, dequant_scale=encoded)


def antiquantised(device: torch.device, *, group_size: int, bias: bool, offset: bool) -> Any:
    half = torch.float16
    shape = (H // group_size, D) if group_size else (D,)
    scale = draw(device, *shape, dtype=half)
    x, matrix = draw(device, S, B, H, dtype=half), integers(device, H, D)
    with alone(device):
        return operators.mm_all_reduce(
            x,
            matrix,
            NAME,
            bias_N=draw(device, D, dtype=half) if bias else None,
            antiquant_scale=scale,
            antiquant_offset=scale if offset else None,
            antiquant_group_size=group_size,
        )


CALLS = {
    "matmul all-reduce": partial(wide, axes=3, bias=False),
    "matmul all-reduce bias": partial(wide, axes=2, bias=True),
    "matmul all-reduce int8 float16": partial(dequantised, dtype=torch.float16, bias=True),
    "matmul all-reduce int8 bfloat16": partial(dequantised, dtype=torch.bfloat16, bias=False),
    **{
        f"matmul all-reduce int8 matrix{' offset' * offset}{' bias' * bias}": partial(
            antiquantised, group_size=16 if bias else 0, bias=bias, offset=offset
        )
        for offset, bias in product((False, True), repeat=2)
    },
}
