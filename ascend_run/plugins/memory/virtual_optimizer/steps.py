"""Steps of the inner optimizer for some of its parameters at a time; imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    import torch

    from ascend_run.ops.memory.host_mapped import HostMapped

Step = Callable[[], object]
"""Steps an optimizer for the parameters that its groups have at the time."""


@contextmanager
def stepping_by(optimizer: torch.optim.Optimizer, step: Step) -> Iterator[None]:
    """Replace the optimizer's step in the block."""
    attributes: dict[str, Any] = vars(optimizer)
    before = attributes.get("step")
    attributes["step"] = step
    try:
        yield
    finally:
        del attributes["step"]
        if before is not None:
            attributes["step"] = before


def one_by_one(
    optimizer: torch.optim.Optimizer, step: Step, after: Callable[[Tensor], None]
) -> None:
    """Step parameter by parameter.

    Args:
        after: Called with each parameter when it has been stepped.
    """
    with _without_parameters(optimizer) as groups:
        for group, parameters in groups:
            for parameter in parameters:
                group["params"] = [parameter]
                step()
                after(parameter)
            group["params"] = []


def with_few_operators(
    optimizer: torch.optim.Optimizer,
    step: Step,
    memory: HostMapped,
    is_on_host: Callable[[Tensor], bool],
) -> None:
    """Step the built-in AdamW, whose operators do not take states on the host: those are for its
    other parameters.

    Args:
        is_on_host: Whether states of a parameter are.
    """
    with _without_parameters(optimizer) as groups:
        for group, parameters in groups:
            group["params"] = [p for p in parameters if not is_on_host(p)]
        step()
        for group, parameters in groups:
            stepped = [p for p in parameters if p.grad is not None and is_on_host(p)]
            if stepped:
                memory.adamw_step_(group, stepped, [optimizer.state[p] for p in stepped])


@contextmanager
def _without_parameters(
    optimizer: torch.optim.Optimizer,
) -> Iterator[list[tuple[dict[str, Any], list[Tensor]]]]:
    """Empty the parameter groups, and give each with the parameters that it has again later."""
    groups = [(group, group["params"]) for group in optimizer.param_groups]
    for group, _ in groups:
        group["params"] = []
    try:
        yield groups
    finally:
        for group, parameters in groups:
            group["params"] = parameters
