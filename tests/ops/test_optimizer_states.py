"""The states of torch optimizers: created before the first step, and checked after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ascend_run.ops.optimizer_states import create_states, state_problems
from ascend_run.plugin_api import OptimizerState
from tests.support.optimizers import SPECS, Lion


def weights(seed: int) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=draw)) for shape in ((4, 3), (5,), (1,))]


def test_creating_states_changes_no_parameter_gradient_or_state() -> None:
    parameters = weights(0)
    optimizer = torch.optim.AdamW(parameters, lr=0.5, weight_decay=0.5)
    parameters[0].grad = torch.ones(4, 3)
    optimizer.step()  # only the first one has a state
    there = {key: value.clone() for key, value in optimizer.state[parameters[0]].items()}
    before = [parameter.detach().clone() for parameter in parameters]
    create_states(optimizer)
    for parameter, value in zip(parameters, before, strict=True):
        assert torch.equal(parameter, value)
    assert [p.grad is None for p in parameters] == [False, True, True]
    assert parameters[0].grad.eq(1).all()
    assert optimizer.param_groups[0]["lr"] == 0.5
    for key, value in there.items():
        assert torch.equal(optimizer.state[parameters[0]][key], value)
    assert all(not state.any() for state in optimizer.state[parameters[1]].values())


@pytest.mark.parametrize("name", SPECS)
def test_created_states_have_their_declared_initial_values(name: str) -> None:
    spec, parameters = SPECS[name], weights(0)
    optimizer = spec.build([{"params": parameters}])
    create_states(optimizer, spec.states)
    assert state_problems(optimizer, spec.states) == []
    for parameter in parameters:
        for key, state in spec.states.items():
            got = optimizer.state[parameter][key]
            expected = parameter if state.initial == "parameter" else state.initial
            assert torch.equal(got, torch.zeros_like(got) + expected)


def test_an_option_of_a_group_that_a_step_changes_is_named() -> None:
    class Counts(Lion):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1

    assert create_states(Counts(weights(0))) == ["count"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"count": None}, "'count' is int64 of shape []; its declaration is absent"),
        (
            {"other": OptimizerState()},
            "'other' is absent; its declaration is float32 of shape [4, 3]",
        ),
        (
            {"momentum": OptimizerState(dtype="bfloat16")},
            "'momentum' is float32 of shape [4, 3]; its declaration is bfloat16 of shape [4, 3]",
        ),
        (
            {"slow": OptimizerState(scalar=True)},
            "'slow' is float32 of shape [4, 3]; its declaration is float32 of shape []",
        ),
    ],
    ids=["undeclared", "absent", "dtype", "shape"],
)
def test_other_states_than_declared_are_named(changes: Any, problem: str) -> None:
    states = {k: v for k, v in {**SPECS["lion"].states, **changes}.items() if v is not None}
    optimizer = SPECS["lion"].build([{"params": weights(0)[:1]}])
    create_states(optimizer)
    assert state_problems(optimizer, states) == [problem]


def test_a_state_that_is_no_tensor_is_named() -> None:
    optimizer = SPECS["sgd"].build([{"params": weights(0)[:1]}])
    optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum_buffer"] = 3
    (problem,) = state_problems(optimizer, SPECS["sgd"].states)
    assert problem.startswith("'momentum_buffer' is of type int; its declaration is float32")


def test_a_state_of_some_parameters_is_expected_of_those_alone() -> None:
    """By the options of their groups."""
    momentum = OptimizerState(where={"kind": "moving"})
    given, still, other = weights(0)
    optimizer = torch.optim.SGD(
        [
            {"params": [given], "kind": "moving", "momentum": 0.5},
            {"params": [still], "kind": "still", "momentum": 0.0},
            {"params": [other], "momentum": 0.0},
        ],
        lr=0.1,
    )
    create_states(optimizer)
    optimizer.state = {p: states for p, states in optimizer.state.items() if states}
    assert state_problems(optimizer, {"momentum_buffer": momentum}) == []
    optimizer.state[still] = {"momentum_buffer": torch.zeros_like(still)}
    (problem,) = state_problems(optimizer, {"momentum_buffer": momentum})
    assert problem == ("'momentum_buffer' is float32 of shape [5]; its declaration is absent")
    optimizer.state = {given: {"other": torch.zeros_like(given)}}
    assert len(state_problems(optimizer, {"momentum_buffer": momentum})) == 2
