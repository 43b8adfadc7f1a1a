"""A metric over the steps, reduced to as many points as a page can draw."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import attrs

from ascend_run.tools.pages.step_metrics import StepMetrics

POINTS = 1500
"""Maximum number of points of one curve; a wide screen has fewer than twice as many pixels."""
_SHOWN_NOT_FINITE = 200


@attrs.frozen(kw_only=True)
class Series:
    """Points of one curve. A point that stands for several values is their mean."""

    steps: tuple[int, ...]
    values: tuple[float | None, ...]
    """None if no value of the point is finite."""
    low: tuple[float | None, ...] = ()
    """Smallest value of each point; empty if every point is one value."""
    high: tuple[float | None, ...] = ()
    not_finite: tuple[tuple[int, str], ...] = ()
    """The first 200 steps whose value is NaN or infinite."""
    readings: int = 0
    """Number of logged values."""
    readings_per_point: int = 1


def series_of(steps: Iterable[StepMetrics], metric: str) -> Series:
    """Return the curve of one metric; empty if no step has it."""
    pairs = [(one.step, value) for one in steps if (value := one.number(metric)) is not None]
    return reduce_points([step for step, _ in pairs], [value for _, value in pairs])


def reduce_points(steps: Sequence[int], values: Sequence[float], limit: int = POINTS) -> Series:
    """Reduce a curve to at most ``limit`` points: means of equally many values, and their range.

    Means and ranges preserve trends and outliers; selecting points would bias a smoothed curve
    towards the outliers.
    """
    size = max(1, math.ceil(len(steps) / limit))
    groups = [slice(i, i + size) for i in range(0, len(steps), size)]
    finite = [[v for v in values[group] if math.isfinite(v)] for group in groups]
    spread = size > 1
    return Series(
        steps=tuple(_middle(steps[group]) for group in groups),
        values=tuple(_mean(v) if v else None for v in finite),
        low=tuple(min(v, default=None) for v in finite) if spread else (),
        high=tuple(max(v, default=None) for v in finite) if spread else (),
        not_finite=tuple(
            (step, str(value))
            for step, value in zip(steps, values, strict=True)
            if not math.isfinite(value)
        )[:_SHOWN_NOT_FINITE],
        readings=len(steps),
        readings_per_point=size,
    )


@attrs.frozen(kw_only=True)
class LoadMap:
    """Share of the tokens that each expert processed, over the steps."""

    edges: tuple[int, ...]
    """First step of each column, and the end of the last one."""
    shares: tuple[tuple[float, ...], ...]
    """For each column, the mean share of each expert; 1/experts if balanced."""
    readings_per_column: int


def load_map(steps: Iterable[StepMetrics], columns: int = 160) -> LoadMap | None:
    """Return the expert load; None if no step has it."""
    rows = [(one.step, load) for one in steps if (load := one.expert_load) is not None]
    if not rows:
        return None
    experts = len(rows[-1][1])
    rows = [row for row in rows if len(row[1]) == experts]  # an older attempt may have had others
    size = max(1, math.ceil(len(rows) / columns))
    groups = [rows[i : i + size] for i in range(0, len(rows), size)]
    return LoadMap(
        edges=(*(group[0][0] for group in groups), rows[-1][0] + 1),
        shares=tuple(
            tuple(_mean(shares) for shares in zip(*(row[1] for row in group), strict=True))
            for group in groups
        ),
        readings_per_column=size,
    )


@attrs.frozen(kw_only=True)
class LayerLoads:
    """Share of each layer's tokens that each of its experts processed, over the steps."""

    edges: tuple[int, ...]
    """First step of each period, and the end of the last one."""
    layers: tuple[int, ...]
    """Layers with experts, from 0."""
    shares: tuple[tuple[tuple[float, ...], ...], ...]
    """For each period and layer, the mean share of each expert."""


def layer_loads(steps: Iterable[StepMetrics], cells: int = 200_000) -> LayerLoads | None:
    """Return the expert load of each layer; None if no step has it.

    Args:
        cells: Maximum number of shares in all; there are so many fewer periods.
    """
    rows: list[tuple[int, dict[int, list[float]]]] = []
    for one in steps:
        if (loads := one.expert_load_by_layer) is not None:
            rows.append((one.step, {at: load for at, load in enumerate(loads) if load}))
    shape = {at: len(load) for at, load in rows[-1][1].items()} if rows else {}
    if not shape:
        return None
    rows = [row for row in rows if {at: len(load) for at, load in row[1].items()} == shape]
    periods = max(1, min(160, cells // sum(shape.values())))
    size = max(1, math.ceil(len(rows) / periods))
    groups = [rows[i : i + size] for i in range(0, len(rows), size)]
    return LayerLoads(
        edges=(*(group[0][0] for group in groups), rows[-1][0] + 1),
        layers=tuple(shape),
        shares=tuple(
            tuple(
                tuple(_mean(shares) for shares in zip(*(row[1][at] for row in group), strict=True))
                for at in shape
            )
            for group in groups
        ),
    )


def _mean(values: Sequence[float]) -> float:
    largest = max(map(abs, values))
    if largest == 0.0:
        return 0.0
    # Relative to the largest value, since the plain sum could overflow.
    return largest * (math.fsum(value / largest for value in values) / len(values))


def _middle(steps: Sequence[int]) -> int:
    return steps[len(steps) // 2] if len(steps) % 2 else (steps[0] + steps[-1]) // 2
