"""The states of torch optimizers: created before the first step, and checked after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ascend_run.core.checkpoint.optimizer_states import check_states, create_states
from ascend_run.plugin_api import CheckpointError, HookError, OptimizerState
from tests.support.optimizers import SPECS, Lion

from .test_optimizer_shards import weights


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
    check_states(optimizer, spec.states)
    for parameter in parameters:
        for key, state in spec.states.items():
            got = optimizer.state[parameter][key]
            expected = parameter if state.initial == "parameter" else state.initial
            assert torch.equal(got, torch.zeros_like(got) + expected)


def test_an_optimizer_that_counts_in_its_groups_is_refused() -> None:
    class Counts(Lion):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1

    with pytest.raises(CheckpointError, match="Counts changes 'count' of its parameter groups"):
        create_states(Counts(weights(0)))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"count": None}, "'count' is not declared, so it is neither planned nor saved"),
        ({"other": OptimizerState()}, "'other' is declared, but its first step does not create it"),
        (
            {"momentum": OptimizerState(dtype="bfloat16")},
            "'momentum' is float32 of shape [4, 3]; declared: bfloat16 of shape [4, 3]",
        ),
        (
            {"slow": OptimizerState(scalar=True)},
            "'slow' is float32 of shape [4, 3]; declared: float32 of shape []",
        ),
    ],
    ids=["undeclared", "absent", "dtype", "shape"],
)
def test_other_states_than_declared_are_refused(changes: Any, problem: str) -> None:
    states = {k: v for k, v in {**SPECS["lion"].states, **changes}.items() if v is not None}
    optimizer = SPECS["lion"].build([{"params": weights(0)[:1]}])
    create_states(optimizer)
    with pytest.raises(HookError) as caught:
        check_states(optimizer, states)
    assert caught.value.problems == (problem,)


def test_a_value_that_is_no_tensor_is_refused() -> None:
    optimizer = SPECS["sgd"].build([{"params": weights(0)[:1]}])
    optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum_buffer"] = 3
    with pytest.raises(HookError, match="'momentum_buffer' is a value of type int; declared"):
        check_states(optimizer, SPECS["sgd"].states)
