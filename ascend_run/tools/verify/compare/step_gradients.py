"""Compare the gradients of training steps, from numbers that do not depend on the layout."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ascend_run.tools.verify.capture.record import Record

from .thresholds import STEP_GRADIENT, STEP_QUIET

Projections = tuple[float, float, float]
"""Norm of a gradient, and its products with two fixed vectors."""


def wrong_gradients(
    candidate: Sequence[Record], reference: Sequence[Record], step: int, *, exact: bool
) -> dict[str, float] | None:
    """Return parameter -> relative error, of the gradients that differ in a step.

    Args:
        step: Index of the step.
        exact: Whether they must be equal, rather than up to rounding.

    Returns:
        None if the gradients of the step were not recorded.
    """
    if not all(len(r.step_gradients) > step for r in (*candidate, *reference)):
        return None
    result, expected = _full(candidate, step), _full(reference, step)
    largest = max((norm for norm, _, _ in expected.values()), default=0.0)
    errors = {
        name: _error(result[name], wanted, STEP_QUIET * largest)
        for name, wanted in expected.items()
        if name in result
    }
    allowed = 0.0 if exact else STEP_GRADIENT
    return {name: error for name, error in errors.items() if error > allowed}


def _full(records: Sequence[Record], step: int) -> dict[str, Projections]:
    """Return the projections of every full gradient; zeros if no rank has one. A gradient of which
    the ranks do not hold full copies is left out."""
    rows: dict[str, list[Sequence[float]]] = {}
    sizes: dict[str, int] = {}
    for record in records:
        for place, row in zip(record.places, record.step_gradients[step], strict=True):
            if place.is_trained:
                rows.setdefault(place.name, []).extend([] if row is None else [row])
                sizes[place.name] = math.prod(place.global_shape)
    found: dict[str, Projections] = {}
    for name, held in rows.items():
        if not held:
            found[name] = (0.0, 0.0, 0.0)
            continue
        count, squares, cosines, sines = map(sum, zip(*held, strict=True))
        if count and count % sizes[name] == 0:
            copies = count / sizes[name]
            found[name] = (math.sqrt(squares / copies), cosines / copies, sines / copies)
    return found


def _error(result: Projections, expected: Projections, quiet: float) -> float:
    norm, *products = (a - b for a, b in zip(result, expected, strict=True))
    error, scale = max(abs(norm), math.hypot(*products)), max(expected[0], quiet)
    if error == 0.0:
        return 0.0
    return error / scale if math.isfinite(error) and scale else math.inf
