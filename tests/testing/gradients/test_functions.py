"""Autograd functions: their calls are recorded, and a wrong backward is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_run.ops.autograd_function import Function
from ascend_run.testing.gradients.differences import Derivative
from ascend_run.testing.gradients.functions import (
    function_derivatives,
    recorded_calls,
    recorded_estimates,
)


class Power(Function):
    """x ** n * w, and the logarithm of x, which has no gradient."""

    factor = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor, n: int, w: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, w)
        ctx.n = n
        log = x.abs().log()
        ctx.mark_non_differentiable(log)
        return x**n * w, log

    @classmethod
    def dx(cls, x: Tensor, n: int) -> Tensor:
        return n * x ** (n - 1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dlog: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        return dy * w * ctx.n * x ** (ctx.n - 1), None, dy * x**ctx.n


class WrongPower(Power):
    """The gradient of x lacks the factor w."""

    forward = Power.__dict__["forward"]

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dlog: Tensor) -> tuple[Tensor | None, ...]:
        x, _ = ctx.saved_tensors
        return dy * ctx.n * x ** (ctx.n - 1), None, dy * x**ctx.n


class Doubles(Function):
    """In place; forward and context are apart."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.mul_(2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_dirty(output)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return 2 * dy


class Rounds(Function):
    """Straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


class RoundsAndSaysSo(Rounds):
    forward = Rounds.__dict__["forward"]
    estimates_gradient = "straight-through"


class Counts(Function):
    """Another factor in each call."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Counts.calls += 1
        ctx.factor = Counts.calls
        return x * ctx.factor

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy * ctx.factor


bound_early = WrongPower.apply
"""As many modules bind it."""


def leaf(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def derivatives(call: Callable[[], Any]) -> list[Derivative]:
    with recorded_calls() as calls:
        call()
    return list(function_derivatives(calls))


def test_a_right_backward_agrees() -> None:
    found = derivatives(lambda: Power.apply(leaf(3, 4), 3, leaf(4)))

    assert [(one.name, one.is_measured, one.agrees) for one in found] == [
        ("its input 'x'", True, True),
        ("its input 'w'", True, True),
    ]


@pytest.mark.parametrize("apply", [WrongPower.apply, bound_early], ids=["now", "bound early"])
def test_a_wrong_backward_is_found(apply: Any) -> None:
    x, w = derivatives(lambda: apply(leaf(3, 4), 3, leaf(4)))

    assert not x.agrees
    assert f"{__name__}.WrongPower with respect to its input 'x' is wrong" in x.problem()
    assert w.agrees


def test_a_missing_factor_is_found_where_it_is_one() -> None:
    ones = torch.ones(4, dtype=torch.float64, requires_grad=True)
    x, w = derivatives(lambda: WrongPower.apply(leaf(3, 4), 3, ones))

    assert not x.agrees
    assert w.agrees


def test_a_function_that_works_in_place_is_replayed() -> None:
    (found,) = derivatives(lambda: Doubles.apply(leaf(3) * 1))

    assert found.is_measured
    assert found.agrees


def test_an_estimate_must_say_so() -> None:
    (found,) = derivatives(lambda: Rounds.apply(leaf(5)))
    assert not found.agrees

    assert derivatives(lambda: RoundsAndSaysSo.apply(leaf(5))) == []
    with recorded_estimates() as estimates:
        assert not estimates
        RoundsAndSaysSo.apply(leaf(5))
        Rounds.apply(leaf(5))
    assert [*estimates] == [f"{__name__}.RoundsAndSaysSo: straight-through"]


def test_a_function_with_state_is_not_measured() -> None:
    (found,) = derivatives(lambda: Counts.apply(leaf(5)))

    assert not found.is_measured


def test_inputs_without_a_gradient_are_left_out() -> None:
    (found,) = derivatives(lambda: Power.apply(leaf(3, 4).detach(), 2, leaf(4)))

    assert found.name == "its input 'w'"


def test_two_calls_of_other_shapes_are_recorded() -> None:
    with recorded_calls() as calls:
        for size in (2, 2, 3, 4):
            Power.apply(leaf(size), 2, leaf(1))

    assert [call.arguments[0].shape[0] for call in calls] == [2, 3]
    assert "forward" in vars(Power)
    with recorded_calls() as later:
        pass
    Power.apply(leaf(2), 2, leaf(1))
    assert later == []
