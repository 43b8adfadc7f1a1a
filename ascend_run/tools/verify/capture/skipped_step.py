"""Record what a step changes that must be skipped, since its gradients overflow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ascend_run.core.checkpoint.optimizer_shards import stepped_parameters
from ascend_run.core.checkpoint.regions import sharded_tensors
from ascend_run.core.train.data_parallel import gather_parameters
from ascend_run.core.train.step import StepResult, TrainStep
from ascend_run.plugin_api import contracts as c
from ascend_run.testing.dry_run import DryRun, gradient_of

from .record import OF_OPTIMIZER, SCHEDULE


def overflowing_step(
    dry_run: DryRun, train_step: TrainStep, batches: Iterator[c.Batch]
) -> tuple[StepResult, list[str]]:
    """Take a step in which gradients of the first pipeline stage are infinite, as an overflow in
    fp16 makes them; the other stages learn of it from each other.

    Returns:
        The result, and what it changed: weights, states of the optimizer, the schedule.
    """
    before = dict(_held(dry_run))
    with _infinite_gradients(dry_run):
        result = dry_run.step(train_step, batches)
    gather_parameters(dry_run.bundle)
    after = dict(_held(dry_run))
    return result, [name for name, held in before.items() if not _equal(held, after.get(name))]


@contextmanager
def _infinite_gradients(dry_run: DryRun) -> Iterator[None]:
    optimizer: Any = dry_run.bundle.optimizer
    inner = optimizer.step

    def step() -> Any:
        if dry_run.context.layout.coordinate("pp") == 0:
            for chunk in dry_run.bundle.chunks:
                for parameter in chunk.parameters():
                    if (gradient := gradient_of(parameter)) is not None and gradient.numel():
                        gradient[(0,) * gradient.ndim] = torch.inf
        return inner()

    optimizer.step = step
    try:
        yield
    finally:
        optimizer.step = inner


def _held(dry_run: DryRun) -> Iterator[tuple[str, Any]]:
    """Yield copies of what a step updates, by name."""
    bundle, vocab_size = dry_run.bundle, dry_run.context.config.model.vocab_size
    for shard in dry_run.shards(Tensor.detach):
        yield f"{shard.name} {shard.offset}", _copied(shard.tensor)
    names = {
        id(held.tensor): held.regions[0].key
        for held in sharded_tensors(bundle.chunks, vocab_size=vocab_size)
        if held.regions
    }
    for item in stepped_parameters(bundle.optimizer):
        name = names.get(id(item.parameter), "a parameter")
        for state, value in item.inner.state[item.stepped].items():
            yield f"{OF_OPTIMIZER} {state} of {name}", _copied(value)
    if bundle.scheduler is not None:
        yield SCHEDULE, dict(bundle.scheduler.state_dict())


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)
