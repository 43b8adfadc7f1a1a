"""Products of groups of rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ascend_run.plugins.npu import operators

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


CALLS = {
    "grouped matmul": partial(grouped, outer=False),
    "grouped matmul transposed": partial(grouped, outer=False, transposed=True),
    "grouped outer": partial(grouped, outer=True),
}
