"""Compare one run with another: what differs, by how much, and where the difference begins."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from ascend_run.tools.verify.capture.record import Record

from . import modules
from .locating import locate
from .readings import Readings
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
    same_weights: bool = False,
) -> Comparison:
    """Compare the records of two runs.

    Args:
        against: Name of the reference.
        exact: Whether the runs must be bitwise equal.
        same_layout: Whether each rank must draw the same random numbers in both runs.
        same_weights: Whether the reference was given the candidate's initial weights, so that there
            are none to compare.
    """
    readings = Readings(candidate, reference, against, exact)
    checks = [*readings.checks(same_layout=same_layout, same_weights=same_weights)]
    failed = {check.name for check in checks if not check.passed}
    expected_trace = modules.trace(reference)
    trace = modules.aligned(modules.trace(candidate), expected_trace)
    return Comparison(
        checks=tuple(checks),
        fault=locate(readings, failed, trace, expected_trace) if failed else None,
        same_bits=readings.same_bits,
        modules=modules.deviations(trace, expected_trace),
    )
