"""Moments of a tensor, which can be compared across layouts."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor


@attrs.define(kw_only=True)
class Moments:
    """Moments of one tensor per micro-batch. They add up over the shards of ranks and do not depend
    on the order of elements.

    Each row: number of elements; sums of the elements, their squares, cubes, absolute values and
    cubed absolute values.
    """

    rows: dict[int, list[float]] = attrs.field(factory=dict)
    """Index of the micro-batch in the global batch -> row."""


@torch.no_grad()
def summary(tensor: Tensor) -> list[float]:
    """Return a row of ``Moments``."""
    x = tensor.detach().reshape(-1).double()
    squares, size = x * x, x.abs()
    sums = torch.stack(
        (x.sum(), squares.sum(), (squares * x).sum(), size.sum(), (squares * size).sum())
    )
    return [float(x.numel()), *sums.tolist()]
