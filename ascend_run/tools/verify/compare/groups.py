"""Compare weight decay and learning rates of the parameters, by name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Final

from ascend_run.tools.verify.capture.record import Record

from .thresholds import WARMUP
from .verdict import Check, ParameterGroup

GROUPS: Final = "parameter groups"
_EXACT: Final = 1e-12
"""Both sides evaluate one short formula in Python's floats."""


def compare_groups(
    candidate: Sequence[Record], reference: Sequence[Record], against: str
) -> tuple[Check, dict[str, float]]:
    """Compare each parameter's weight decay, and its learning rate in each step.

    Returns:
        The check, and the wrong parameters with their errors.
    """
    rates, expected = _merged(candidate), _merged(reference)
    wrong: dict[str, float] = {}
    details = []
    for name in sorted(rates.keys() | expected.keys()):
        problems = [*_problems(rates.get(name), expected.get(name))]
        if problems:
            wrong[name] = math.inf
            details.append(f"{name} {problems[0]}")
    check = Check(
        name=GROUPS,
        against=against,
        passed=not details,
        where=next(iter(wrong), ""),
        details=tuple(details),
    )
    return check, wrong


def groups_of(records: Sequence[Record], learning_rate: float) -> tuple[ParameterGroup, ...]:
    """Return the parameters by weight decay and learning rate, as the optimizer has them.

    Args:
        learning_rate: Of the run.
    """

    def key(item: tuple[str, Sequence[float]]) -> tuple[float, float]:
        decay, *rates = item[1]
        # The warm-up rises linearly from 0; nothing is above the rate at its end.
        highest = learning_rate * min(len(rates) - 1, WARMUP) / WARMUP
        return decay, max(rates) / highest if highest else math.nan

    rates = sorted(_merged(records).items(), key=key)
    return tuple(
        ParameterGroup(weight_decay=decay, lr_multiplier=times, parameters=tuple(n for n, _ in of))
        for (decay, times), of in groupby(rates, key)
    )


def _merged(records: Sequence[Record]) -> Mapping[str, Sequence[float]]:
    """Ranks with a shard of one parameter that disagree are reported by its NaNs."""
    merged: dict[str, Sequence[float]] = {}
    for record in records:
        for name, rates in record.rates.items():
            known = merged.setdefault(name, rates)
            if list(known) != list(rates):
                merged[name] = [math.nan] * len(rates)
    return merged


def _problems(rates: Sequence[float] | None, expected: Sequence[float] | None) -> Iterator[str]:
    if rates is None:
        yield "is in no group of the optimizer"
    elif expected is None:
        yield "is in a group of the optimizer, but should not train"
    elif any(map(math.isnan, rates)):
        yield "has other rates on other ranks"
    else:
        (decay, *steps), (expected_decay, *expected_steps) = rates, expected
        if not _equal(decay, expected_decay):
            yield f"has weight decay {decay:g}, expected {expected_decay:g}"
        for step, (rate, wanted) in enumerate(zip(steps, expected_steps, strict=True), start=1):
            if not _equal(rate, wanted):
                yield f"has learning rate {rate:g} in step {step}, expected {wanted:g}"


def _equal(one: float, other: float) -> bool:
    return abs(one - other) <= _EXACT * abs(other)
