"""Rotary tables of a step's tokens, each at its position in a text of its own length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from .step import Step
from .text_lengths import TextLengths

# T tokens of a step or a part, R rotary dim

TablesAt = Callable[[Tensor, int], Tensor]
"""Positions [T] and the length of their text -> tables [..., T, R]."""


class RotaryPositions:
    """Selects tables from those of whole texts; the tables of lengths that grow are computed.

    Args:
        at: Computes tables; their dtype is changed here.
    """

    def __init__(
        self, at: TablesAt, lengths: TextLengths, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._at, self.lengths = at, lengths
        self._dtype, self._device = dtype, device
        stands = {lengths.longest} if lengths.boundary is None else {lengths.boundary}
        if not lengths.grows:
            stands.add(lengths.longest)
        self._whole: Final = {
            length: self._computed(torch.arange(length), length)
            for length in {lengths.counted(stand) for stand in stands}
        }

    def tables(self, step: Step) -> Tensor:
        """Return the tables of a step: [..., T, R]."""
        counted = {self.lengths.counted(part.length) for part in step.parts}
        if len(counted) <= 1:
            length = counted.pop() if counted else self.lengths.counted(1)
            return self._of(step.positions_T, length)
        parts = [
            self._of(step.positions_T[part.rows], self.lengths.counted(part.length))
            for part in step.parts
        ]
        return torch.cat(parts, dim=-2)

    def _of(self, positions_T: Tensor, length: int) -> Tensor:
        if (whole := self._whole.get(length)) is None:
            return self._computed(positions_T.cpu(), length)
        return whole.index_select(-2, positions_T)

    def _computed(self, positions_T: Tensor, length: int) -> Tensor:
        return self._at(positions_T, length).to(device=self._device, dtype=self._dtype)
