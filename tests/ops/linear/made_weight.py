"""A weight that is stored in another form, and whose values are made when they are needed."""

from __future__ import annotations

import weakref

from torch import Tensor


class MadeWeight:
    """Make copies of a weight; count them, and how many live at a time."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._made: list[weakref.ref[Tensor]] = []
        self.most = 0

    def __call__(self) -> Tensor:
        values = self._weight.clone()
        self._made.append(weakref.ref(values))
        self.most = max(self.most, self.living)
        return values

    @property
    def calls(self) -> int:
        return len(self._made)

    @property
    def living(self) -> int:
        return sum(made() is not None for made in self._made)
