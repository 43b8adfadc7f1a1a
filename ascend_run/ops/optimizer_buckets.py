"""Step an optimizer for some of its parameters at a time. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ascend_run.types.optimizer import SteppedParameter


def buckets(numels: Sequence[int], limit: int) -> Iterator[range]:
    """Yield the positions of each bucket: as many as have at most ``limit`` elements, or one."""
    start, total = 0, 0
    for position, numel in enumerate(numels):
        if position > start and total + numel > limit:
            yield range(start, position)
            start, total = position, 0
        total += numel
    if numels:
        yield range(start, len(numels))


@contextmanager
def stepping_some(
    optimizer: torch.optim.Optimizer,
) -> Iterator[Callable[[Sequence[Tensor]], None]]:
    """Yield a function that steps the optimizer for some of its parameters, in the order of its
    groups. Afterwards the groups have all of theirs again."""
    groups = optimizer.param_groups
    whole: list[list[Tensor]] = [group["params"] for group in groups]

    def step(parameters: Sequence[Tensor]) -> None:
        chosen = {*parameters}
        for group, members in zip(groups, whole, strict=True):
            group["params"] = [p for p in members if p in chosen]
        optimizer.step()

    try:
        yield step
    finally:
        for group, members in zip(groups, whole, strict=True):
            group["params"] = members


def updated_elements(item: SteppedParameter) -> Tensor:
    """Return the elements of the model's weight that are updated on this rank, [elements]."""
    weight = item.parameter.detach().view(-1)
    return weight if item.flat_range is None else weight[slice(*item.flat_range)]
