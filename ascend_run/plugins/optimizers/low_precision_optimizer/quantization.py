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
        self.signed = signed
        exact = torch.tensor(dynamic_values(signed=signed), dtype=torch.float64)
        self._values = exact.to(device, torch.float32)
        borders = ((exact[1:] + exact[:-1]) / 2).to(torch.float32)
        # A cell, of places with the same upper 16 bits, has one border at most. With its entry, the
        # code of a place is the upper half of their sum: the lower half carries at the border.
        cells = torch.arange(2**15, dtype=torch.int32) << 16
        lowest = torch.where(cells < 2**30, cells, ~cells).view(torch.float32)
        entries = (torch.bucketize(lowest, borders, out_int32=True, right=True) << 16) - cells
        places = _places(borders.view(torch.int32))
        entries[places >> 16] += -places & 0xFFFF
        self._entries = entries.to(device)

    def quantized(self, wide_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes [N] in uint8 and scales [K] in float32.

        The scale of a block is its value of the largest magnitude, with its sign, so that this
        value is kept exactly and the codes of dequantized values are the same.
        """
        (length,) = wide_N.shape
        blocks = _padded(wide_N).view(-1, BLOCK)
        scales = blocks.amax(dim=-1)
        if self.signed:
            low = blocks.amin(dim=-1)
            scales = torch.where(scales >= -low, scales, low)
        is_zero = scales.abs() < _SMALLEST
        scales.masked_fill_(is_zero, 0.0)
        units = blocks / scales.masked_fill(is_zero, torch.inf).unsqueeze(-1)
        bits = units.view(-1).view(torch.int32)
        places = _places(bits) if self.signed else bits & 0x7FFFFFFF  # NaN has a sign
        cells = torch.bitwise_right_shift(places, 16, out=bits)
        codes = self._entries.index_select(0, cells).add_(places).bitwise_right_shift_(16)
        return codes.to(torch.uint8)[:length], scales

    def dequantized(self, codes_N: Tensor, scales_K: Tensor) -> Tensor:
        """Return float32 values, [N]."""
        (length,) = codes_N.shape
        # A CPU looks up by int64 faster than by int32 as long as they stay in its caches.
        units = self._values.index_select(0, _padded(codes_N).long()).view(-1, BLOCK)
        return units.mul_(scales_K.unsqueeze(-1)).view(-1)[:length]


def _padded(tensor_N: Tensor) -> Tensor:
    """Return the tensor with zeros up to whole blocks."""
    missing = -len(tensor_N) % BLOCK
    return F.pad(tensor_N, (0, missing)) if missing else tensor_N


def _places(bits: Tensor) -> Tensor:
    """Return int32 numbers in the order of units of one sign, from their bits; from 0 on, of
    negative ones from 2^30 on. Those of NaN are not negative either."""
    return (bits >> 31).bitwise_xor_(bits)
