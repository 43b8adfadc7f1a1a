"""Search for the most bytes that memory has room for. No torch."""

from __future__ import annotations

from typing import Final

import attrs

_CLOSE: Final = 32
"""The search ends within this part of the distance at its beginning."""


@attrs.define
class Search:
    """Bisection between a budget that memory had room for and bytes that it had not."""

    least: int  #: What is kept at least; whether there is room for it shows when it is tried.
    fails: int  #: The fewest bytes for which memory ran out.
    fits: int = attrs.field()  #: The largest budget with which a step has run.
    most: int = attrs.field(kw_only=True)  #: What no budget is above, though there may be room.
    budget: int = 0  #: The present one.
    is_settled: bool = False  #: Whether it has been found; then it is lowered, and never raised.
    _unit: int = attrs.field(init=False)

    @fits.default
    def _nothing_is_known(self) -> int:
        return self.least

    @_unit.default
    def _part_of_the_distance(self) -> int:
        return max(1, (min(self.fails, self.most) - self.least) // _CLOSE)

    def failed(self, kept: int) -> int:
        """Return the next budget, after memory ran out.

        Args:
            kept: The bytes that were kept, or were going to be.
        """
        self.fails = max(self.least, min(self.fails, kept))
        if self.fits >= self.fails:  # there was room for it once
            self.fits = self.least
        return self._next()

    def ran(self) -> int | None:
        """Return the next budget, after a step has run; None if the present one stays."""
        if self.is_settled:
            return None
        self.fits = max(self.fits, self.budget)
        self.is_settled = self._is_close or self.fits >= self.most
        return None if self.is_settled else self._next()

    @property
    def _is_close(self) -> bool:
        return self.fails - self.fits <= self._unit

    def _next(self) -> int:
        budget = self.fits if self._is_close else (self.fits + self.fails) // 2
        self.budget = min(budget, self.most)
        return self.budget
