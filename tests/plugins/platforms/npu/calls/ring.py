"""Merging two attentions."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ascend_run.plugins.platforms.npu.operators import ring as operators

from .draws import B, D, N, S, T, draw


def update(device: torch.device, *, layout: str, dtype: torch.dtype) -> Any:
    packed = layout == "TND"
    out = draw(device, *((T, N, D) if packed else (S, B, N * D)), dtype=dtype)
    largest = draw(device, *((T, N, 8) if packed else (B, N, S, 8)))
    triple = (out, largest, largest.abs() + 1)
    starts = torch.tensor([0, 3, T], device=device) if packed else None
    return operators.ring_attention_update(triple, triple, layout, starts)


CALLS = {
    "ring update SBH": partial(update, layout="SBH", dtype=torch.bfloat16),
    "ring update TND": partial(update, layout="TND", dtype=torch.float32),
}
