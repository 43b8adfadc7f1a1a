"""Matrices stored in MXFP4, read as bfloat16.

A block has 32 consecutive inputs of one output: 16 bytes of two FP4 numbers (E2M1) each, the first
in the low half, and one exponent (E8M0). Source: OCP Microscaling Formats (MX) 1.0, section 5.
"""

from __future__ import annotations

from typing import Any, Final

import attrs
import torch
from torch import Tensor

_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK: Final = 32
_POSITIVE: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS: Final = (*_POSITIVE, *(-number for number in _POSITIVE))
_BIAS: Final = 127
"""Of the exponents."""


@attrs.frozen
class PackedMatrices:
    """[E, in, out], with the interface of a slice of safetensors.

    Args:
        blocks, scales: Slices of uint8, [E, out, in / 32, 16] and [E, out, in / 32].
    """

    blocks: Any
    scales: Any

    def get_shape(self) -> list[int]:
        experts, outputs, blocks, _ = self.blocks.get_shape()
        return [experts, blocks * _BLOCK, outputs]

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, where: tuple[int, slice, slice]) -> Tensor:
        expert, inputs, outputs = where
        start, stop, _ = inputs.indices(self.get_shape()[1])
        held = slice(start // _BLOCK, -(-stop // _BLOCK))
        pairs = self.blocks[expert, outputs, held]
        exponents = self.scales[expert, outputs, held].int() - _BIAS
        indices = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2).int()
        numbers = torch.ldexp(torch.tensor(_NUMBERS)[indices], exponents.unsqueeze(-1))
        first = held.start * _BLOCK
        return numbers.bfloat16().flatten(-2)[:, start - first : stop - first].t()


def with_packed(slices: dict[str, Any]) -> dict[str, Any]:
    """Return stored tensors with each pair of blocks and scales as one tensor, by its name."""
    found = dict(slices)
    for name in [name.removesuffix(_BLOCKS) for name in slices if name.endswith(_BLOCKS)]:
        blocks, scales = slices[name + _BLOCKS], slices.get(name + _SCALES)
        if _is_packed(blocks, scales):
            del found[name + _BLOCKS], found[name + _SCALES]
            found[name] = PackedMatrices(blocks, scales)
    return found


def _is_packed(blocks: Any, scales: Any) -> bool:
    if scales is None or {blocks.get_dtype(), scales.get_dtype()} != {"U8"}:
        return False
    shape = blocks.get_shape()
    return len(shape) == 4 and [*shape] == [*scales.get_shape(), _BLOCK // 2]
