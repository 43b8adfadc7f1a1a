"""Curves reduced to what a page can hold, without losing what they are read for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_run.tools.pages.step_metrics import StepMetrics
from ascend_run.tools.report.series import (
    POINTS,
    layer_loads,
    load_map,
    reduce_points,
    series_of,
)

anything = st.floats(allow_nan=True, allow_infinity=True)


def steps(lines: Iterable[Mapping[str, object]]) -> list[StepMetrics]:
    return [StepMetrics.of_line(line) for line in lines]


def test_a_short_curve_stays_as_it_is() -> None:
    series = reduce_points([1, 2, 5], [3.0, 2.0, 4.0])
    assert (series.steps, series.values) == ((1, 2, 5), (3.0, 2.0, 4.0))
    assert (series.low, series.high, series.readings_per_point) == ((), (), 1)


def test_a_long_curve_is_means_with_their_range() -> None:
    series = reduce_points(list(range(1, 13)), [float(v) for v in range(1, 13)], limit=4)
    assert series.values == (2.0, 5.0, 8.0, 11.0)
    assert series.low == (1.0, 4.0, 7.0, 10.0)
    assert series.high == (3.0, 6.0, 9.0, 12.0)
    assert series.steps == (2, 5, 8, 11)
    assert (series.readings, series.readings_per_point) == (12, 3)


@settings(deadline=None)
@given(st.lists(anything, max_size=300), st.integers(1, 50))
def test_any_values_give_few_points_that_hold_the_extremes(values: list[float], limit: int) -> None:
    series = reduce_points(list(range(len(values))), values, limit)
    assert len(series.steps) <= limit
    assert list(series.steps) == sorted(set(series.steps))
    finite = [v for v in values if math.isfinite(v)]
    low = [v for v in (series.low or series.values) if v is not None]
    high = [v for v in (series.high or series.values) if v is not None]
    assert (min(low, default=None), max(high, default=None)) == (
        min(finite, default=None),
        max(finite, default=None),
    )
    assert len(series.not_finite) == min(200, len(values) - len(finite))


def test_one_spike_in_fifty_thousand_readings_is_still_seen() -> None:
    values = [1.0] * 50_000
    values[31_337] = 99.0
    series = reduce_points(list(range(50_000)), values)
    assert len(series.steps) <= POINTS
    assert max(v for v in series.high if v is not None) == 99.0


def test_values_near_the_largest_float_do_not_overflow() -> None:
    largest = 1.7e308
    assert reduce_points([1, 2], [largest, largest], limit=1).values[0] == pytest.approx(largest)


def test_readings_that_are_not_finite_are_listed_and_leave_a_gap() -> None:
    series = series_of(steps([{"step": 1, "loss": 2.0}, {"step": 2, "loss": "NaN"}]), "loss")
    assert series.values == (2.0, None)
    assert series.not_finite == ((2, "nan"),)


def test_what_is_not_a_number_is_passed_over() -> None:
    records = [{"step": 1, "loss": None}, {"step": 2, "loss": "text"}, {"step": 3, "loss": [1]}]
    assert series_of(steps(records), "loss").steps == ()


def test_expert_load_is_averaged_over_columns() -> None:
    records = [{"step": s, "expert_load": [0.25 + 0.5 * (s % 2), 0.75 - 0.5 * (s % 2)]}
               for s in range(1, 9)]  # fmt: skip
    load = load_map(steps(records), columns=2)
    assert load is not None
    assert load.shares == ((0.5, 0.5), (0.5, 0.5))
    assert load.edges == (1, 5, 9)
    assert load.readings_per_column == 4


def test_expert_load_with_gaps_or_another_size_is_left_out() -> None:
    records = [
        {"step": 1, "expert_load": [1.0]},
        {"step": 2, "expert_load": [0.5, "NaN"]},
        {"step": 3, "expert_load": "none"},
        {"step": 4, "expert_load": [0.5, 0.5]},
    ]
    load = load_map(steps(records))
    assert load is not None
    assert load.shares == ((0.5, 0.5),)
    assert load_map(steps([{"step": 1, "loss": 1.0}])) is None


def test_loads_of_layers_are_averaged_over_periods() -> None:
    """Layers without experts are left out, and so are broken readings."""
    broken = [[[0.5]], "none", [[0.5, "NaN"], [1.0], [0.25, 0.75]], [1.0]]
    records = [{"step": 0, "expert_load_by_layer": value} for value in broken]
    records += [
        {"step": s, "expert_load_by_layer": [[], [s % 2, 1 - s % 2], [0.25, 0.75]]}
        for s in range(1, 9)
    ]
    loads = layer_loads(steps(records), cells=8)
    assert loads is not None
    assert loads.layers == (1, 2)
    assert loads.shares == (((0.5, 0.5), (0.25, 0.75)),) * 2
    assert loads.edges == (1, 5, 9)
    without = [{"step": 1, "loss": 1.0}, {"step": 2, "expert_load_by_layer": [[]]}]
    assert layer_loads(steps(without)) is None
