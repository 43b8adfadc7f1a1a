"""Grouped GEMMs."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ascend_run.plugins.platforms.npu import operators
from ascend_run.plugins.platforms.npu.operators import grouped as products

from .draws import D, H, T, X, draw


def _ends(device: torch.device, *ends: int) -> Tensor:
    return torch.tensor(ends, dtype=torch.int64, device=device)


def grouped(device: torch.device, *, outer: bool, transposed: bool = False) -> Any:
    x, ends = draw(device, T, H), _ends(device, 4, 4, T)
    if outer:
        return operators.grouped_outer(draw(device, T, D).t(), x, ends)
    shape = (X, D, H) if transposed else (X, H, D)
    matrices = draw(device, *shape)
    return operators.grouped_matmul(x, matrices.mT if transposed else matrices, ends)


def per_group(device: torch.device, *, outer: bool) -> Any:
    x, counts = draw(device, T, H), _ends(device, 4, 0, T - 4)
    if outer:
        return products.grouped_outer(draw(device, T, D).t(), x, counts, per_group=True)
    return products.grouped_matmul(x, draw(device, X, H, D), counts, per_group=True)


def added(device: torch.device, *, dtype: torch.dtype) -> Any:
    a, b = draw(device, T, H, dtype=dtype), draw(device, T, D, dtype=dtype)
    total = draw(device, X, H, D)
    products.grouped_matmul_add_(total, a, b, _ends(device, 4, 4, T))
    return total


def lists(device: torch.device) -> Any:
    rows = [draw(device, 4, H), draw(device, 3, D)]
    return products.matmuls(rows, [draw(device, H, D), draw(device, D, H)])


CALLS = {
    "grouped matmul per group": partial(per_group, outer=False),
    "grouped outer per group": partial(per_group, outer=True),
    "grouped matmul add float16": partial(added, dtype=torch.float16),
    "grouped matmul add bfloat16": partial(added, dtype=torch.bfloat16),
    "matmuls of their own": lists,
    "grouped matmul": partial(grouped, outer=False),
    "grouped matmul transposed": partial(grouped, outer=False, transposed=True),
    "grouped outer": partial(grouped, outer=True),
}
