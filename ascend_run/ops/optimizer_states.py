"""The states of a torch optimizer: create them before its first step, check them after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ascend_run.types.optimizer import OptimizerState


def torch_optimizers(optimizer: object) -> Iterator[torch.optim.Optimizer]:
    """Yield the optimizers in Megatron's, which has one for each kind of parameters; none in None.

    Args:
        optimizer: ``ModelBundle.optimizer``.
    """
    for part in getattr(optimizer, "chained_optimizers", ()):
        yield part.optimizer


def create_states(
    optimizer: torch.optim.Optimizer, declared: Mapping[str, OptimizerState] | None = None
) -> list[str]:
    """Create the states that a torch optimizer creates in its first step.

    Takes a step with zero gradients and a zero learning rate for the parameters without state.
    Parameters, gradients and existing states are unchanged, but an optimizer that has a method
    ``expand_states`` replaces its states by those of a checkpoint, until its next step.

    Args:
        declared: Name -> state, for its initial value; others are zeros.

    Returns:
        Options of parameter groups that the step changes. They are no states, so they are lost
        where states are saved.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    missing = [p for p in parameters if not optimizer.state.get(p)]
    if not missing:
        _expand(optimizer)
        return []
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
    _expand(optimizer)
    with torch.no_grad():
        for parameter, value in zip(missing, values, strict=True):
            parameter.copy_(value)
            for name, state in optimizer.state[parameter].items():
                if _is_tensor(state):
                    initial = (declared or {}).get(name, OptimizerState()).initial
                    state.copy_(value if initial == "parameter" else torch.tensor(initial))
    changed = {
        name
        for group, before in zip(optimizer.param_groups, options, strict=True)
        for name, value in group.items()
        if name != "params" and not _is_tensor(value) and before.get(name) != value
    }
    return sorted(changed)


def _expand(optimizer: torch.optim.Optimizer) -> None:
    expand: Callable[[], None] = getattr(optimizer, "expand_states", lambda: None)
    expand()


def state_problems(
    optimizer: torch.optim.Optimizer, declared: Mapping[str, OptimizerState]
) -> list[str]:
    """Return a message for each state that an optimizer keeps otherwise than declared.

    Call it after the first step, which creates them. Parameters without any state are left out.
    """
    problems: dict[str, str] = {}
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for parameter, states in optimizer.state.items():
        options = groups.get(id(parameter), {})
        own = {name: state for name, state in declared.items() if state.exists_for(options)}
        for name in own.keys() | states.keys():
            found, expected = _found(states.get(name)), _expected(own.get(name), parameter)
            if found != expected:
                problems[name] = f"{name!r} is {found}; its declaration is {expected}"
    return [problems[name] for name in sorted(problems)]


def _found(state: Any) -> str:
    if not _is_tensor(state):
        return "absent" if state is None else f"of type {type(state).__name__}"
    return f"{str(state.dtype).removeprefix('torch.')} of shape {list(state.shape)}"


def _expected(state: OptimizerState | None, parameter: Tensor) -> str:
    if state is None:
        return "absent"
    shape = [] if state.scalar else list(parameter.shape)
    shape = [-(-parameter.numel() // state.block)] if state.block else shape
    return f"{state.dtype} of shape {shape}"


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
