"""The difference of two tensors that should have equal bits."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor


@attrs.frozen
class Difference:
    """How two tensors differ."""

    largest: float
    text: str


def difference(one: Tensor, other: Tensor) -> Difference | None:
    """Return the difference of two tensors; None if all bits are equal."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        kinds = (f"{tensor.dtype} {list(tensor.shape)}" for tensor in (one, other))
        return Difference(torch.inf, " and ".join(kinds))
    first, second = _bits(one), _bits(other)
    if torch.equal(first, second):
        return None
    unequal = (first != second).view(one.numel(), -1).any(1)
    distance = (one.reshape(-1)[unequal].double() - other.reshape(-1)[unequal].double()).abs()
    largest = torch.inf if distance.isnan().any() else float(distance.max())
    return Difference(
        largest,
        f"{int(unequal.sum()):,} of {one.numel():,} elements differ, by at most {largest:.3g}",
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
