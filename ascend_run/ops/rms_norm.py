"""Root-mean-square normalisation in one autograd node.

Source: Zhang and Sennrich 2019, arXiv:1910.07467.
"""

# H hidden size

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x * x) + eps) * weight`` over the last axis, in x's dtype."""
    return F.rms_norm(x, (x.shape[-1],), weight_H, eps)
