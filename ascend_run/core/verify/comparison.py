"""One run against another: what differs, by how much, and where it begins."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from . import modules
from .locating import locate
from .readings import Readings
from .record import Record
from .verdict import Check, Fault, ModuleDeviation


@attrs.frozen(kw_only=True)
class Comparison:
    """A candidate against one reference."""

    checks: tuple[Check, ...]
    fault: Fault | None
    same_bits: bool
    modules: tuple[ModuleDeviation, ...]


def compare(
    candidate: Sequence[Record],
    reference: Sequence[Record],
    *,
    against: str,
    exact: bool = False,
    same_layout: bool = False,
) -> Comparison:
    """
    Args:
        against: The reference in words.
        exact: Every bit must be equal.
        same_layout: Rank for rank the runs draw the same random numbers.
    """
    readings = Readings(candidate, reference, against, exact)
    checks = [*readings.checks(same_layout)]
    failed = {check.name for check in checks if not check.passed}
    expected_trace = modules.trace(reference)
    trace = modules.aligned(modules.trace(candidate), expected_trace)
    return Comparison(
        checks=tuple(checks),
        fault=locate(readings, failed, trace, expected_trace) if failed else None,
        same_bits=readings.same_bits,
        modules=modules.deviations(trace, expected_trace),
    )
