"""An additive bias of the whole sequence, block by block of what ranks hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .blocks import Block
from .cut import Span
from .sums import sum_dtype

# S and T positions of the whole sequence's queries and keys, of either of which there may be one
# for all


class Bias:
    """[..., S, T], of which this rank's queries need their rows only.

    Args:
        queries: What this rank holds.
        keys: Step of the ring -> what it has of the keys.
    """

    def __init__(
        self, bias: Tensor, queries: Sequence[Span], keys: Callable[[int], Sequence[Span]]
    ) -> None:
        self._bias, self._keys = bias, keys
        self._rows = _positions(queries, bias.device)
        self._columns: dict[int, Tensor] = {}
        self._sums: Tensor | None = None

    def of(self, step: int, block: Block) -> Tensor:
        """The part of a block's queries and keys."""
        part = self._bias
        for dim, places in self._places(step, block):
            part = part.index_select(dim, places)
        return part

    def add(self, step: int, block: Block, gradient: Tensor) -> None:
        """The gradient of a block's part."""
        if self._sums is None:
            self._sums = torch.zeros_like(self._bias, dtype=sum_dtype(self._bias))
        gradient = gradient.to(self._sums.dtype)
        places = dict(self._places(step, block))
        if len(places) == 2:
            self._sums[..., places[-2][:, None], places[-1]] += gradient
        elif places:
            ((dim, wanted),) = places.items()
            self._sums.index_add_(dim, wanted, gradient)
        else:
            self._sums += gradient

    def gradient(self) -> Tensor:
        """In the shape and dtype of the bias: the share of this rank's queries. The ranks' shares
        are summed as any parameter's are."""
        if self._sums is None:
            return torch.zeros_like(self._bias)
        return self._sums.to(self._bias.dtype)

    def _places(self, step: int, block: Block) -> list[tuple[int, Tensor]]:
        """Axis -> positions, where the bias has one for each."""
        if step not in self._columns:
            self._columns[step] = _positions(self._keys(step), self._bias.device)
        wanted = ((-2, self._rows[block.rows]), (-1, self._columns[step][block.columns]))
        shape = self._bias.shape
        return [(dim, places) for dim, places in wanted if len(shape) >= -dim and shape[dim] > 1]


def _positions(spans: Sequence[Span], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(*span, device=device) for span in spans])
