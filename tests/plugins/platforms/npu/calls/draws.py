"""Sizes and random tensors of the calls."""

from __future__ import annotations

import torch
from torch import Tensor

S, J, B, N, G, D, T, H, X = 6, 9, 2, 4, 2, 16, 10, 32, 3


def draw(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    generator = torch.Generator(device=device).manual_seed(sum(shape))
    return torch.randn(shape, dtype=dtype, device=device, generator=generator)


def integers(device: torch.device, *shape: int) -> Tensor:
    """Draw int8 from its full range."""
    if device.type == "meta":
        return torch.empty(shape, dtype=torch.int8, device=device)
    generator = torch.Generator(device=device).manual_seed(sum(shape))
    return torch.randint(-128, 128, shape, dtype=torch.int8, device=device, generator=generator)
