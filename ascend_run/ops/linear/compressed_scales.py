"""Scales in 8 bits each: the double quantisation of QLoRA.

Source: arXiv:2305.14314, section 3; the dynamic map is that of arXiv:2110.02861, section 2.2. Equal
in every bit to ``quantize_blockwise`` and ``dequantize_blockwise`` of bitsandbytes 0.50.2 on a CPU,
in its compiled library. Its CUDA kernels search the nearest value of the map, so that their codes
may differ; see ``code_boundaries``.
"""

# B scales, G groups of scales (B / 256, rounded up)

from __future__ import annotations

from typing import Final

import attrs
import torch
from torch import Tensor

GROUP: Final = 256
"""Scales that share one float32 scale."""
_EXPONENTS: Final = 7
_STEPS: Final = 65535


@attrs.frozen(eq=False)
class CompressedScales:
    """Float32 scales as ``values[codes] * absmax + offset``, one absmax for each group of 256.

    Bytes: B + 4 * ceil(B / 256) + 4, and 1 KiB for the map.
    """

    codes_B: Tensor  #: uint8.
    absmax_G: Tensor  #: float32.
    offset: Tensor  #: float32, a scalar.
    values: Tensor  #: The dynamic map, float32 [256].

    def scales(self) -> Tensor:
        """Return the scales, float32 [B]."""
        scales_B = self.values.index_select(0, self.codes_B.int())
        full = scales_B.numel() // GROUP * GROUP
        scales_B[:full].view(-1, GROUP).mul_(self.absmax_G[: full // GROUP].unsqueeze(1))
        scales_B[full:].mul_(self.absmax_G[full // GROUP :])
        return scales_B.add_(self.offset)


def compress_scales(scales_B: Tensor) -> CompressedScales:
    """Return scales, float32 and at least one, in 8 bits each.

    Numerics: the offset is their mean, whose last bits depend on the device and, of more than
    32,768 scales on a CPU, on the number of threads.
    """
    offset = scales_B.mean()
    rest_B = scales_B - offset
    num_groups = -(-rest_B.numel() // GROUP)
    # The padding changes no absmax.
    rest_GK = torch.nn.functional.pad(rest_B, (0, num_groups * GROUP - rest_B.numel()))
    rest_GK = rest_GK.view(num_groups, GROUP)
    absmax_G = rest_GK.abs().amax(dim=1)
    scaled_GK = rest_GK.mul_((1 / absmax_G).unsqueeze(1)).clamp_(-1, 1)
    # 0 / 0, and 0 * inf where absmax has no finite reciprocal.
    scaled_GK.nan_to_num_(nan=-1.0)
    values = dynamic_map()
    boundaries = code_boundaries(values).to(scales_B.device)
    codes_GK = torch.bucketize(scaled_GK, boundaries, out_int32=True).to(torch.uint8)
    codes_B = codes_GK.view(-1)[: scales_B.numel()].clone()
    return CompressedScales(codes_B, absmax_G, offset, values.to(scales_B.device))


def dynamic_map() -> Tensor:
    """Return the 256 values that a code stands for, ascending, float32 on the CPU.

    Of each sign 127 in seven decades, 2**i of them equally spaced within 10**(i - 7) and
    10**(i - 6); 0; and 1.
    """
    positive = []
    for exponent in range(_EXPONENTS):
        edges = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32, device="cpu")
        middles = (edges[:-1] + edges[1:]) / 2
        positive.append(10 ** (exponent + 1 - _EXPONENTS) * middles)
    magnitudes = torch.cat(positive)
    ends = torch.tensor([0.0, 1.0], device="cpu")
    return torch.cat([-magnitudes, magnitudes, ends]).sort().values


def code_boundaries(values: Tensor) -> Tensor:
    """Return the largest value in [-1, 1] of each code but the last, float32 [255].

    A value's code is not always that of the nearest value of the map: bitsandbytes takes the
    nearest to the value rounded to 65,536 equal steps. Where the map is finer than a step, near 0,
    most codes are thus never taken, and a boundary occurs several times.
    """
    codes = torch.arange(len(values) - 1)
    low, high = torch.full(codes.shape, -1.0), torch.full(codes.shape, 1.0)
    for _ in range(64):  # until the two are adjacent: no boundary is closer to 0 than 2**-26
        middle = (low + high) / 2
        is_above = _codes(middle, values) > codes
        low, high = torch.where(is_above, low, middle), torch.where(is_above, middle, high)
    return low


def _codes(scaled: Tensor, values: Tensor) -> Tensor:
    """Return the codes of values in [-1, 1], by bitsandbytes' own steps."""
    step = ((scaled + 1) * 0.5).mul_(_STEPS).add_(0.5).to(torch.int32)
    rounded = step.float() * 2 / _STEPS - 1
    return torch.bucketize(rounded, (values[:-1] + values[1:]) / 2)
