"""Which forward's backward comes next."""

from __future__ import annotations

from itertools import pairwise


class BackwardOrder:
    """In which order the backwards of a step's forwards come: as they did in the step before.

    Within one forward of a model it is the reverse of the forwards. Which micro-batch, and which
    chunk of a virtual pipeline, comes next is the schedule's affair, the same in every step; so it
    is not computed here but seen.
    """

    def __init__(self) -> None:
        self._came: list[int] = []
        self._next: dict[int | None, int] = {}

    def begin_step(self) -> None:
        """What came since the last call is the order to expect from now on."""
        if self._came:
            self._next = dict(pairwise([None, *self._came]))
        self._came = []

    def came(self, number: int) -> None:
        """The backward of one forward of this step has begun."""
        self._came.append(number)

    @property
    def known(self) -> bool:
        """Whether a step was seen."""
        return bool(self._next)

    @property
    def next(self) -> int | None:
        """The forward whose backward is expected next of all; None where it is not known."""
        return self._next.get(self._came[-1] if self._came else None)

    def after(self, number: int) -> int | None:
        """The forward whose backward is expected after that of another; None where it is the
        last."""
        return self._next.get(number)
