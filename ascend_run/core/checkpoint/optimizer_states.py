"""The states of a torch optimizer: create them before its first step, check them after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ascend_run.plugin_api import CheckpointError, HookError
from ascend_run.plugin_api.contracts import OptimizerState


def create_states(
    optimizer: torch.optim.Optimizer, declared: Mapping[str, OptimizerState] | None = None
) -> None:
    """Create the states that a torch optimizer creates in its first step.

    Takes a step with zero gradients and a zero learning rate for the parameters without state.
    Parameters, gradients and existing states are unchanged.

    Args:
        declared: Name -> state, for its initial value; others are zeros.

    Raises:
        CheckpointError: The step changes an option of a parameter group, which is not saved.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    missing = [p for p in parameters if not optimizer.state.get(p)]
    if not missing:
        return
    gradients = [p.grad for p in parameters]
    options = [{**group} for group in optimizer.param_groups]
    values = [p.detach().clone() for p in missing]
    try:
        for parameter in parameters:
            parameter.grad = None
        for parameter in missing:
            parameter.grad = torch.zeros_like(parameter)
        for group in optimizer.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if _is_tensor(group["lr"]) else 0.0
        optimizer.step()
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for group, before in zip(optimizer.param_groups, options, strict=True):
            group["lr"] = before["lr"]
    _refuse_changed(optimizer, options)
    with torch.no_grad():
        for parameter, value in zip(missing, values, strict=True):
            parameter.copy_(value)
            for name, state in optimizer.state[parameter].items():
                if _is_tensor(state):
                    initial = (declared or {}).get(name, OptimizerState()).initial
                    state.copy_(value if initial == "parameter" else torch.tensor(initial))


def check_states(optimizer: torch.optim.Optimizer, declared: Mapping[str, OptimizerState]) -> None:
    """Check the states that an optimizer keeps after its first step.

    Raises:
        HookError: They are not those that its OptimizerSpec declares.
    """
    problems: dict[str, str] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if states := optimizer.state.get(parameter):
                problems.update(_misfits(parameter, states, declared))
    if problems:
        raise HookError(
            f"{type(optimizer).__name__} does not keep the states that its OptimizerSpec declares",
            [problems[name] for name in sorted(problems)],
        )


def _misfits(
    parameter: Tensor, states: Mapping[str, Any], declared: Mapping[str, OptimizerState]
) -> Iterator[tuple[str, str]]:
    """Yield (name of a state, what is wrong with it)."""
    for name in declared.keys() - states.keys():
        yield name, f"{name!r} is declared, but its first step does not create it"
    for name, state in states.items():
        if name not in declared:
            yield name, f"{name!r} is not declared, so it is neither planned nor saved"
            continue
        shape = () if declared[name].scalar else tuple(parameter.shape)
        expected = f"{declared[name].dtype} of shape {list(shape)}"
        found = f"a value of type {type(state).__name__}"
        if _is_tensor(state):
            dtype = str(state.dtype).removeprefix("torch.")
            found = f"{dtype} of shape {list(state.shape)}"
        if found != expected:
            yield name, f"{name!r} is {found}; declared: {expected}"


def _refuse_changed(optimizer: torch.optim.Optimizer, options: list[dict[str, Any]]) -> None:
    changed = {
        key
        for group, before in zip(optimizer.param_groups, options, strict=True)
        for key, value in group.items()
        if key != "params" and not _is_tensor(value) and before.get(key) != value
    }
    if changed:
        raise CheckpointError(
            "this optimizer cannot be checkpointed",
            [
                f"{type(optimizer).__name__} changes {key!r} of its parameter groups, which are "
                "not saved; keep it in optimizer.state[parameter]"
                for key in sorted(changed)
            ],
        )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
