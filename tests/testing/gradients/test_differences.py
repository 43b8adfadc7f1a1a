"""Slopes by differences: of smooth functions, and where a function jumps or has a kink."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from ascend_run.testing.gradients.differences import STEPS, Derivative, slopes


def measured(function: Callable[[float], float], size: float = 1.0) -> tuple[float, float, bool]:
    (slope,) = slopes(lambda t: [function(t)], [size])
    return slope.value, slope.bound, slope.is_measured


@pytest.mark.parametrize(
    ("function", "slope"),
    [
        (lambda t: 3.0 + 2.0 * t, 2.0),
        (lambda t: math.exp(5.0 * t), 5.0),
        (lambda t: math.tanh(1.0 + t), 1.0 - math.tanh(1.0) ** 2),
        (lambda t: 1.0 + t**3, 0.0),
    ],
    ids=["line", "exponential", "tanh", "zero"],
)
def test_a_smooth_slope_is_measured_within_its_bound(
    function: Callable[[float], float], slope: float
) -> None:
    value, bound, is_measured = measured(function)

    assert is_measured
    assert abs(value - slope) <= bound < 1e-6


def test_the_bound_covers_rounding() -> None:
    """Of values with an error of 16 units of eps, as after a sum of 256 terms."""
    errors = iter([16.0, -16.0] * 4)
    value, bound, _ = measured(lambda t: 1.0 + t + next(errors) * 2.0**-52)

    assert 0.0 < abs(value - 1.0) <= bound


@pytest.mark.parametrize("place", [0.9 * STEPS[0], 0.3 * STEPS[0], -0.6 * STEPS[0]])
def test_a_jump_between_the_points_needs_a_smaller_step(place: float) -> None:
    value, bound, is_measured = measured(lambda t: 2.0 * t + 0.01 * (t > place))

    assert is_measured
    assert abs(value - 2.0) <= bound < 1e-6


def test_a_jump_at_the_point_itself_is_not_measured() -> None:
    assert not measured(lambda t: 2.0 * t + 0.01 * (t > 0))[2]


def test_a_kink_between_the_points_needs_a_smaller_step() -> None:
    value, _, is_measured = measured(lambda t: t + abs(t - 0.7 * STEPS[0]))

    assert is_measured
    assert abs(value) < 1e-6


def test_each_of_several_functions_has_its_slope() -> None:
    found = slopes(lambda t: (t, 1e-3 * math.sin(t), 7.0), (1.0, 1e-3, 7.0))

    assert [round(slope.value, 9) for slope in found] == [1.0, 1e-3, 0.0]
    assert all(slope.is_measured for slope in found)


def derivative(gradient: float, slope: float, **changes: object) -> Derivative:
    given = {"bound": 1e-9, "is_measured": True, **changes}
    return Derivative(name="w", of="the main loss", gradient=gradient, slope=slope, **given)


@pytest.mark.parametrize(
    ("found", "agrees"),
    [
        (derivative(1.0, 1.0 + 1e-9), True),
        (derivative(1.0, 1.0 + 1e-6), False),
        (derivative(0.0, 1e-10), True),
        (derivative(0.0, 1e-6), False),
        (derivative(0.0, 1.0, is_measured=False), True),
        (derivative(0.0, 0.0, is_required=True), False),
    ],
)
def test_a_gradient_agrees_within_the_bound(found: Derivative, agrees: bool) -> None:
    assert found.agrees is agrees


def test_the_message_says_which_gradient_is_missing_or_wrong() -> None:
    assert derivative(0.0, 0.5).problem() == (
        "w gets no gradient from the main loss, which depends on it: its slope along a random "
        "direction is 0.5 by differences"
    )
    assert "is 1, by differences 0.5, a relative error of 5.00e-01" in derivative(1, 0.5).problem()
    required = derivative(0.0, 0.0, is_required=True)
    assert required.problem() == "w gets no gradient from the main loss, only from auxiliary losses"
