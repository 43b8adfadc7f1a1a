"""Masks of the fused attention: built once, shared by every call."""

# S queries, J keys

from __future__ import annotations

import torch
from torch import Tensor

from ascend_run.ops.attention.visibility import Rectangle, Shape

from . import operators
from .operators import Sparsity


class SharedMasks:
    """One compressed mask for every causal and banded call of any length: 4 MiB.

    Args:
        compressed: False gives every call a full mask [S, J] instead, built once per call shape.
    """

    def __init__(self, *, compressed: bool = True) -> None:
        self.compressed = compressed
        self._made: dict[tuple[object, ...], Tensor] = {}

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All masks that are held."""
        return tuple(self._made.values())

    def of(self, part: Rectangle, device: torch.device) -> Sparsity:
        """Return the arguments that make the operator compute the visible part of a rectangle."""
        if part.shape is Shape.FULL:
            return Sparsity()
        if not self.compressed:
            return Sparsity(operators.WHOLE_MASK, self._whole(part, device))
        mask = self._triangle(device)
        if part.shape is Shape.CAUSAL:
            return Sparsity(operators.LEFT_UP_CAUSAL, mask)
        # The operator counts a band from the lower right corner, a rectangle from the upper left.
        shift = part.num_keys - part.num_queries
        return Sparsity(
            operators.BAND, mask, pre_tokens=shift - part.low, next_tokens=part.high - shift
        )

    def documents(self, device: torch.device) -> Sparsity:
        """Return the arguments for packed documents, each causal."""
        return Sparsity(operators.LEFT_UP_CAUSAL, self._triangle(device))

    def _triangle(self, device: torch.device) -> Tensor:
        side = operators.COMPRESSED_MASK_SIZE
        key = (device,)
        if key not in self._made:
            ones = torch.ones(side, side, dtype=torch.bool, device=device)
            self._made[key] = ones.triu(1)
        return self._made[key]

    def _whole(self, part: Rectangle, device: torch.device) -> Tensor:
        low = part.low if part.shape is Shape.BAND else -part.num_queries
        high = part.high if part.shape is Shape.BAND else 0
        key = (device, part.num_queries, part.num_keys, low, high)
        if key not in self._made:
            away = torch.arange(part.num_keys, device=device) - torch.arange(
                part.num_queries, device=device
            ).unsqueeze(1)
            self._made[key] = (away > high) | (away < low)
        return self._made[key]
