"""bfloat16 matmuls in float32, for processors on which those are faster."""

# M and N outer widths, K inner width

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Matmul(Protocol):
    """A matmul with the arguments of ``torch.mm``."""

    def __call__(self, input: Tensor, mat2: Tensor, *, out: Tensor | None = None) -> Tensor: ...

    def __hash__(self) -> int: ...


def wide_matmul(input: Tensor, mat2: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Compute ``input @ mat2``, [M, K] and [K, N] -> [M, N], in float32 for bfloat16 operands.

    Shapes and dtypes: those of ``torch.mm``; other dtypes are multiplied without conversion.
    Numerics: a product of two bfloat16 numbers is exact in float32, so the result is the float32
    sum, rounded once.
    """
    if input.dtype is not torch.bfloat16:
        return torch.mm(input, mat2, out=out)
    product = torch.mm(input.float(), mat2.float())
    return product.to(input.dtype) if out is None else out.copy_(product)
