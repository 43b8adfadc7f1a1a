"""Rotary position embedding, as documented."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def npu_rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Any = None
) -> Tensor:
    assert rotate is None
    assert input.dim() == r1.dim() == r2.dim() == 4
    assert input.shape[-1] % 2 == 0
    assert input.shape[-1] < 896
    if rotary_mode == "half":
        x1, x2 = input.chunk(2, -1)
        turned = torch.cat((-x2, x1), -1)
    else:
        assert rotary_mode == "interleave"
        turned = torch.stack((-input[..., 1::2], input[..., ::2]), -1).flatten(-2)
    return r1 * input + r2 * turned
