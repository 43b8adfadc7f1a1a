"""Block-wise quantization to 8 bits by a dynamic tree; imports torch.

Source: Dettmers et al. 2022, arXiv:2110.02861, sections 2.1 and 2.2; the values are those of
bitsandbytes and torchao.
"""

# N = elements, K = blocks of BLOCK elements, the last of which may be shorter

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from .parameters import BLOCK

_DECADES: Final = 7
_SMALLEST: Final = 2.0**-100
"""Blocks without a larger value become zeros: with one, no product of a value and a scale is
subnormal, so that a block that is dequantized and quantized again has the same codes."""


def dynamic_values(*, signed: bool) -> list[float]:
    """Return the 256 values in [-1, 1] or [0, 1]: zero, one, and in each decade from 1e-6 on twice
    as many as in the one before, evenly spaced."""
    values = [0.0, 1.0]
    for decade in range(_DECADES):
        count = 2**decade * (1 if signed else 2)
        width = 0.9 / count
        scale = 10.0 ** (decade - _DECADES + 1)
        means = [scale * (0.1 + width * (at + 0.5)) for at in range(count)]
        values += means + ([-mean for mean in means] if signed else [])
    return sorted(values)


class Quantizer:
    """Quantizes to one set of values, on one device."""

    def __init__(self, *, signed: bool, device: torch.device) -> None:
        values = torch.tensor(dynamic_values(signed=signed), dtype=torch.float64)
        self.values = values.to(device, torch.float32)
        borders = ((values[1:] + values[:-1]) / 2).to(torch.float32)
        self.borders = F.pad(borders, (0, 1), value=torch.inf).to(device)
        # Cells of floats with the same upper 16 bits hold at most one border each.
        cells = (torch.arange(2**16) << 16).to(torch.int32)
        smallest = torch.where(cells < 0, cells | 0xFFFF, cells).view(torch.float32)
        self.lowest_codes = torch.bucketize(smallest, borders, out_int32=True, right=True)
        self.lowest_codes = self.lowest_codes.to(device)

    def quantized(self, wide_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes [N] in uint8 and scales [K] in float32.

        The scale of a block is its value of the largest magnitude, with its sign, so that this
        value is kept exactly and the codes of dequantized values are the same.
        """
        (length,) = wide_N.shape
        blocks = F.pad(wide_N, (0, -length % BLOCK)).view(-1, BLOCK)
        low, high = blocks.amin(dim=-1), blocks.amax(dim=-1)
        scales = torch.where(high >= -low, high, low)
        scales = torch.where(scales.abs() < _SMALLEST, 0.0, scales)
        divisors = torch.where(scales == 0, torch.inf, scales)
        units = (blocks / divisors.unsqueeze(-1)).view(-1)
        cells = (units.view(torch.int32) >> 16).bitwise_and_(0xFFFF)
        codes = self.lowest_codes.index_select(0, cells)
        codes += units >= self.borders.index_select(0, codes)
        return codes.to(torch.uint8)[:length], scales

    def dequantized(self, codes_N: Tensor, scales_K: Tensor) -> Tensor:
        """Return float32 values, [N]."""
        (length,) = codes_N.shape
        units = self.values.index_select(0, codes_N.int())
        units = F.pad(units, (0, -length % BLOCK)).view(-1, BLOCK)
        return units.mul_(scales_K.unsqueeze(-1)).view(-1)[:length]
