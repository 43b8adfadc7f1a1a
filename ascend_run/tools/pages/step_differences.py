"""Compare two runs step by step: the first step that differs, and how much losses differ after."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import attrs

from ascend_run.plugin_api.errors import DataError

from .fingerprint_file import Entry

PARTS: Final[Mapping[str, str]] = {
    "consumed_samples": "data position",
    "batch": "samples read",
    "loss": "loss",
    "grad_norm": "gradient norm",
    "parameters": "parameters",
}
"""Field of an entry -> its name, in the order in which a step reaches them."""
_HASHES: Final = ("batch", "parameters")
_DATA: Final = ("consumed_samples", "batch")
_ROWS: Final = 9

Entries = Mapping[int, Entry]
Pair = tuple[Entry, Entry]


@attrs.frozen(kw_only=True)
class FirstDifference:
    """The first step in which two runs differ."""

    step: int
    parts: tuple[str, ...]
    """Fields of an entry, as in ``PARTS``."""


@attrs.frozen(kw_only=True)
class StepComparison:
    """Comparison of two runs over their common steps."""

    common: tuple[int, ...]
    first: FirstDifference | None
    """None if the runs are equal."""
    largest_loss_difference: tuple[int, float] | None
    """Step and nats per token, from the first difference on."""
    first_data: Pair | None
    """The first step with different samples or data positions."""
    shown: tuple[Pair, ...]
    """Selected steps to show: the last equal one, the first different one, and fewer and fewer of
    the following ones, up to the last."""

    @property
    def missing(self) -> int:
        """Number of steps between the first and the last common one that are not common."""
        return self.common[-1] - self.common[0] + 1 - len(self.common)


def compare_steps(one: Entries, other: Entries) -> StepComparison:
    """
    Raises:
        DataError: They have no step in common.
    """
    common = sorted(one.keys() & other.keys())
    if not common:
        raise DataError(
            "the runs have no step in common",
            [f"one has {steps_of(one)}, the other {steps_of(other)}; compare two that overlap"],
        )
    pairs = [(one[step], other[step]) for step in common]
    index = next((i for i, pair in enumerate(pairs) if different_parts(*pair)), None)
    if index is None:
        return StepComparison(
            common=tuple(common),
            first=None,
            largest_loss_difference=None,
            first_data=None,
            shown=(pairs[-1],),
        )
    return StepComparison(
        common=tuple(common),
        first=FirstDifference(step=common[index], parts=different_parts(*pairs[index])),
        largest_loss_difference=_largest(pairs[index:]),
        first_data=next((p for p in pairs[index:] if {*different_parts(*p)} & {*_DATA}), None),
        shown=tuple(pairs[i] for i in _shown(index, len(pairs))),
    )


def different_parts(one: Entry, other: Entry) -> tuple[str, ...]:
    """Return the fields in which two entries differ, ignoring hashes that one of them lacks."""
    return tuple(
        part
        for part in PARTS
        if _exact(getattr(one, part)) != _exact(getattr(other, part))
        and not (part in _HASHES and None in (getattr(one, part), getattr(other, part)))
    )


def loss_difference(one: Entry, other: Entry) -> float | None:
    """Return |a - b|; None if one of them has no loss."""
    if one.loss is None or other.loss is None:
        return None
    if _exact(one.loss) == _exact(other.loss):
        return 0.0
    return abs(one.loss - other.loss)


def steps_of(entries: Entries) -> str:
    """Format as ``steps 0 to 6``."""
    return f"steps {min(entries)} to {max(entries)}" if entries else "none"


def _exact(value: object) -> str:
    """A representation that distinguishes all values, including NaN, and 0.0 from -0.0."""
    return repr(value)


def _largest(pairs: Sequence[Pair]) -> tuple[int, float] | None:
    known = [(pair[0].step, d) for pair in pairs if (d := loss_difference(*pair)) is not None]
    if not known:
        return None
    return max(known, key=lambda item: math.inf if math.isnan(item[1]) else item[1])


def _shown(first: int, count: int) -> list[int]:
    def candidates() -> Iterator[int]:
        if first > 0:
            yield first - 1
        distance = 0
        while first + distance < count:
            yield first + distance
            distance = 2 * distance + 1

    chosen = [*candidates()]
    if len(chosen) > _ROWS:
        chosen = chosen[: _ROWS - 1]
    return chosen if chosen[-1] == count - 1 else [*chosen, count - 1]
