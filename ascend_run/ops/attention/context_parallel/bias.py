"""Slices an additive bias of the full sequence into the blocks that ranks compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .blocks import Block
from .partitions import Span
from .sums import sum_dtype

# S and T: positions of the full sequence's queries and keys; either dim may be 1 (broadcast)


class Bias:
    """A bias [..., S, T], of which this rank uses the rows of its own queries.

    Args:
        queries: Positions of this rank's queries.
        keys: Maps a ring step to the positions of its keys.
    """

    def __init__(
        self, bias: Tensor, queries: Sequence[Span], keys: Callable[[int], Sequence[Span]]
    ) -> None:
        self._bias, self._keys = bias, keys
        self._rows = _positions(queries, bias.device)
        self._columns: dict[int, Tensor] = {}
        self._sums: Tensor | None = None

    def of(self, step: int, block: Block) -> Tensor:
        """Return the slice of a block's queries and keys."""
        part = self._bias
        for dim, indices in self._indices(step, block):
            part = part.index_select(dim, indices)
        return part

    def add(self, step: int, block: Block, gradient: Tensor) -> None:
        """Accumulate the gradient of a block's slice."""
        if self._sums is None:
            self._sums = torch.zeros_like(self._bias, dtype=sum_dtype(self._bias))
        gradient = gradient.to(self._sums.dtype)
        indices = dict(self._indices(step, block))
        if len(indices) == 2:
            self._sums[..., indices[-2][:, None], indices[-1]] += gradient
        elif indices:
            ((dim, wanted),) = indices.items()
            self._sums.index_add_(dim, wanted, gradient)
        else:
            self._sums += gradient

    def gradient(self) -> Tensor:
        """Return this rank's contribution, in the shape and dtype of the bias. It is reduced over
        ranks like any parameter's gradient."""
        if self._sums is None:
            return torch.zeros_like(self._bias)
        return self._sums.to(self._bias.dtype)

    def _indices(self, step: int, block: Block) -> list[tuple[int, Tensor]]:
        """Return (dim, positions) for each dim that is not broadcast."""
        if step not in self._columns:
            self._columns[step] = _positions(self._keys(step), self._bias.device)
        wanted = ((-2, self._rows[block.rows]), (-1, self._columns[step][block.columns]))
        shape = self._bias.shape
        return [(dim, indices) for dim, indices in wanted if len(shape) >= -dim and shape[dim] > 1]


def _positions(spans: Sequence[Span], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(*span, device=device) for span in spans])
