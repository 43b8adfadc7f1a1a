"""What is kept of a tensor so that it can be compared whichever way ranks cut it."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor


@attrs.define(kw_only=True)
class Moments:
    """Summaries of one tensor a micro-batch that add up over the parts that ranks hold, and do not
    depend on the order of elements.

    Each row: how many elements; their sum, sum of squares, of cubes, of absolute values, and of
    cubes of absolute values.
    """

    rows: dict[int, list[float]] = attrs.field(factory=dict)
    """Micro-batch of the global batch -> row."""


@torch.no_grad()
def summary(tensor: Tensor) -> list[float]:
    """Elements; their sum, squares', cubes', magnitudes' and cubed magnitudes' sums."""
    x = tensor.detach().reshape(-1).double()
    squares, size = x * x, x.abs()
    sums = torch.stack(
        (x.sum(), squares.sum(), (squares * x).sum(), size.sum(), (squares * size).sum())
    )
    return [float(x.numel()), *sums.tolist()]
