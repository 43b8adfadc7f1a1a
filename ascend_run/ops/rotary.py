"""Rotary position embedding in one autograd node.

Source: Su et al. 2021, arXiv:2104.09864.
"""

# S sequence on this rank, B batch, N heads, D head width, R rotated width (at most D)

from __future__ import annotations

import torch
from torch import Tensor


def rotary(x_SBND: Tensor, cos_SR: Tensor, sin_SR: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first R of D; pairs are (i, i + R/2), or (2i, 2i + 1) where interleaved."""
    width = cos_SR.shape[-1]
    cos, sin = (t.to(x_SBND.dtype)[:, None, None, :] for t in (cos_SR, sin_SR))
    x, rest = x_SBND[..., :width], x_SBND[..., width:]
    if interleaved:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    else:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    rotated = x * cos + turned * sin
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated
