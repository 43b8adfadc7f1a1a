"""Packs several tensors side by side in one buffer, for a single collective."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# S positions and ... batch dims, which all tensors share; n_i heads and D_i width of tensor i


class Columns:
    """The layout of tensors [S, ..., n_i, D_i] in the rows of a buffer [S, W].

    A position's full batch of one tensor is contiguous, so batch and heads can be viewed as one
    dim. W counts elements if all dtypes are equal, else bytes; then the widest dtype comes first
    and the row is padded, so that every tensor is aligned to its item size.

    Args:
        heads: n_i, if they differ from the tensors'.
    """

    def __init__(self, like: Sequence[Tensor], heads: Sequence[int] | None = None) -> None:
        numbers = heads or [x.shape[-2] for x in like]
        self.shapes = [(*x.shape[1:-2], n, x.shape[-1]) for n, x in zip(numbers, like, strict=True)]
        self.dtypes = [x.dtype for x in like]
        mixed = len(set(self.dtypes)) > 1
        self.buffer_dtype = torch.uint8 if mixed else self.dtypes[0]
        item_sizes = [x.itemsize if mixed else 1 for x in like]
        self.widths = [
            math.prod(shape) * item for shape, item in zip(self.shapes, item_sizes, strict=True)
        ]
        self.offsets = [0] * len(like)
        end = 0
        for i in sorted(range(len(like)), key=lambda i: -item_sizes[i]):
            self.offsets[i] = end
            end += self.widths[i]
        self.width = end + -end % max(item_sizes)

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the buffer: one copy of each tensor; none for a single contiguous tensor."""
        first = tensors[0]
        if len(tensors) == 1 and first.is_contiguous():
            return first.flatten(1)
        buffer = first.new_empty((first.shape[0], self.width), dtype=self.buffer_dtype)
        for place, x in zip(self.unpack(buffer), tensors, strict=True):
            place.copy_(x)
        return buffer

    def unpack(self, buffer: Tensor) -> list[Tensor]:
        """Return views of a buffer [..., W], in the shapes and dtypes of the tensors."""
        return [
            buffer.narrow(-1, offset, width).view(dtype).unflatten(-1, shape)
            for offset, width, dtype, shape in zip(
                self.offsets, self.widths, self.dtypes, self.shapes, strict=True
            )
        ]
