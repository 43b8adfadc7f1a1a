"""Projections of a tensor, which can be compared across layouts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def projections(values: Tensor, offset: Sequence[int], global_shape: Sequence[int]) -> list[float]:
    """Return numbers of a shard that add up over the shards of a tensor: the number of elements,
    the sum of their squares, and their products with the cosines and the sines of their indices in
    the full tensor.

    Elements that are NaN are left out.
    """
    index = torch.zeros((), dtype=torch.float64)
    stride = 1
    for axis in reversed(range(values.ndim)):
        start, size = offset[axis], values.shape[axis]
        along = torch.arange(start, start + size, dtype=torch.float64) * stride
        index = index + along.view(-1, *[1] * (values.ndim - 1 - axis))
        stride *= global_shape[axis]
    held = ~values.isnan()
    x, index = values.detach()[held].double().cpu(), index.expand(values.shape)[held.cpu()]
    sums = torch.stack((x.square().sum(), (x * index.cos()).sum(), (x * index.sin()).sum()))
    return [float(x.numel()), *sums.tolist()]
