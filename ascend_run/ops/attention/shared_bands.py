"""A cache of additive band masks, shared by layers and micro-batches."""

# S queries, J keys

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor

from .blockwise_attention import band
from .visibility import SHARED_BANDS, Rectangle, Shape


class SharedBands:
    """Caches ``blockwise_attention.band``; the tensors must not be modified."""

    def __init__(self) -> None:
        self._made: OrderedDict[tuple[object, ...], Tensor] = OrderedDict()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All cached masks."""
        return tuple(self._made.values())

    def of(self, part: Rectangle, like: Tensor) -> Tensor:
        """Return the mask [S, J] of ``band``."""
        borders = (part.low, part.high) if part.shape is Shape.BAND else part.shape
        key = (part.num_queries, part.num_keys, borders, like.dtype, like.device)
        if key not in self._made:
            self._made[key] = band(part, like)
            while len(self._made) > SHARED_BANDS:
                self._made.popitem(last=False)
        self._made.move_to_end(key)
        return self._made[key]
