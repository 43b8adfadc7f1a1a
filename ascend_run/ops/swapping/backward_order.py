"""Predict which forward's backward runs next."""

from __future__ import annotations


class BackwardOrder:
    """Predict the order of a step's backwards: the same as in the previous step.

    Within one forward of a model it is the reverse of the forwards. The order of micro-batches and
    of chunks of a virtual pipeline depends on the schedule and is the same in every step; so it is
    recorded instead of computed.
    """

    def __init__(self) -> None:
        self._came: list[int] = []
        self._next: dict[int | None, int] = {}

    def begin_step(self) -> None:
        """Use the order recorded since the last call as the prediction for this step."""
        if self._came:
            before: list[int | None] = [None, *self._came]
            self._next = dict(zip(before, self._came, strict=False))
        self._came = []

    def came(self, number: int) -> None:
        """Record that the backward of one forward of this step has started."""
        self._came.append(number)

    @property
    def known(self) -> bool:
        """Whether the order of a step was recorded."""
        return bool(self._next)

    @property
    def next(self) -> int | None:
        """The forward whose backward is expected next; None if unknown."""
        return self._next.get(self._came[-1] if self._came else None)

    def after(self, number: int) -> int | None:
        """Return the forward whose backward follows another's; None if that is the last."""
        return self._next.get(number)
