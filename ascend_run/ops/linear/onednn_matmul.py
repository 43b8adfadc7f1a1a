"""float32 matmuls by oneDNN, for processors on which those are faster than ``torch.mm``.

``torch.mm`` calls the BLAS that torch was built with. That may not use all vector instructions of
another vendor's processor, where oneDNN, which generates its kernels, does.
"""

# M and N outer widths, K inner width

from __future__ import annotations

import torch
from torch import Tensor

from .matmul_blocks import blocks


def onednn_matmul(input: Tensor, mat2: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Compute ``input @ mat2``, [M, K] and [K, N] -> [M, N].

    Shapes and dtypes: those of ``torch.mm``, which computes what oneDNN does not: other dtypes,
    empty operands, what autograd differentiates, and everything if torch has no oneDNN.
    Numerics: float32; the reduction order is that of oneDNN.

    torch's operator of oneDNN returns a new tensor. With ``out`` it computes one block of the
    product after the other, each of which is copied to ``out``.
    """
    if not _is_supported(input, mat2):
        return torch.mm(input, mat2, out=out)
    if out is None:
        return _product(input, mat2)
    for rows, columns in blocks(input.shape[0], mat2.shape[1]):
        out[rows, columns].copy_(_product(input[rows], mat2[:, columns]))
    return out


def _product(input: Tensor, mat2: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(input, mat2.t(), None, "none", [], "")
    return product


def _is_supported(input: Tensor, mat2: Tensor) -> bool:
    if torch.is_grad_enabled() and (input.requires_grad or mat2.requires_grad):
        return False
    has_shapes = input.dim() == mat2.dim() == 2 and 0 < input.shape[1] == mat2.shape[0]
    is_float32 = input.dtype is mat2.dtype is torch.float32
    return has_shapes and is_float32 and bool(torch.backends.mkldnn.is_available())
