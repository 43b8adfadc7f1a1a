"""Orthogonalize matrices by Newton-Schulz iterations; imports torch."""

# A, B = rows and columns of a matrix; leading dimensions are a batch of matrices

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
"""a, b and c of ``f(s) = a s + b s^3 + c s^5``: five iterations map singular values in [0.01, 1] to
about [0.7, 1.2]."""
EPSILON: Final = 1e-7


def orthogonalized(x: Tensor, num_steps: int) -> Tensor:
    """Return ``U f(f(...f(S / |S|))) V^T`` of ``U S V^T``, with |S| the Frobenius norm.

    Args:
        x: [..., A, B], in the dtype of the matmuls and of the result; not modified. It is freed
            before the iterations if nothing else refers to it: they take the memory of two
            matrices and of one Gram matrix.

    Numerics: the operations of ``torch.optim.Muon`` for one bfloat16 matrix, in their order.
    Source: https://kellerjordan.github.io/posts/muon.
    """
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = x / norm.clamp(min=EPSILON)
    for _ in range(num_steps):
        x = _added(x, _polynomial(x), x, beta=COEFFICIENTS[0], alpha=1.0)
    return x.mT if is_tall else x


def _polynomial(x: Tensor) -> Tensor:
    """Return ``b X X^T + c (X X^T)^2``."""
    _, b, c = COEFFICIENTS
    gram = x @ x.mT
    return _added(gram, gram, gram, beta=b, alpha=c)


def _added(to: Tensor, left: Tensor, right: Tensor, *, beta: float, alpha: float) -> Tensor:
    """Return ``beta * to + alpha * left @ right``."""
    if to.ndim == 2:
        return torch.addmm(to, left, right, beta=beta, alpha=alpha)
    flat = (x.flatten(0, -3) for x in (to, left, right))
    return torch.baddbmm(*flat, beta=beta, alpha=alpha).view_as(to)
