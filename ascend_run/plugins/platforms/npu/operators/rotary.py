"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_mul(x_SBND: Tensor, cos_S11D: Tensor, sin_S11D: Tensor, interleaved: bool) -> Tensor:
    """Compute ``x * cos + rotated * sin``, rotated being (-second, first) of each pair."""
    mode = "interleave" if interleaved else "half"
    out: Tensor = torch.ops.npu.npu_rotary_mul(x_SBND, cos_S11D, sin_S11D, mode)
    return out
