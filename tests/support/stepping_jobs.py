"""Jobs for gloo ranks: optimizer steps, some of them skipped, and checkpoints between them."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ascend_run.plugin_api import TensorShard
from ascend_run.testing.runtime import RankOutcome
from tests.support.small_runs import Training, Values, outcome_of, training

Readings: TypeAlias = list[tuple[Any, ...]]
"""Loss, gradient norm and whether it was skipped, of each step."""


@contextmanager
def shards_of(run: Training) -> Iterator[list[TensorShard]]:
    """Give the shards of a checkpoint."""
    from ascend_run.core.checkpoint.optimizer_shards import materialized, optimizer_shards
    from ascend_run.core.checkpoint.regions import model_shards, sharded_tensors

    tensors = sharded_tensors(run.bundle.chunks, vocab_size=run.values["model.vocab_size"])
    spec = run.bundle.optimizer_spec
    assert spec is not None
    with materialized(run.bundle.optimizer):
        states = optimizer_shards(run.bundle.optimizer, tensors, declared=spec.states)
        yield [*model_shards(tensors, prefix="model"), *states]


def take_steps(
    run: Training,
    steps: int,
    overflowing: Collection[int],
    every: int,
    after: Callable[[], object] = lambda: None,
) -> tuple[Readings, list[str]]:
    """Take steps, some of which overflow.

    Args:
        every: Look at the state after every so many steps.
        after: Called after each.

    Returns:
        The readings, and digests of every tensor of the checkpoint.
    """
    if overflowing:
        _scale_loss(run)
    readings, digests = [], []
    for step in range(1, steps + 1):
        with _overflow(run, step in overflowing):
            result = run.step()
        readings.append((result.loss, result.grad_norm, result.skipped))
        after()
        if step % every == 0:
            digests.append(_digest(run))
    run.bundle.optimizer.zero_grad()  # type: ignore[union-attr]
    return readings, digests


def saved(values: Values, enable: Sequence[str], folder: str, steps: int) -> RankOutcome:
    """Take steps, save, and return what was saved."""
    from ascend_run.core.checkpoint import FileStore, GroupRanks

    with training(values, enable) as run:
        for _ in range(steps):
            run.step()
        with shards_of(run) as shards:
            store = FileStore(folder, layout=run.context.layout, ranks=GroupRanks())
            store.save(steps, shards, {})
            return outcome_of(shards)


def continued(values: Values, enable: Sequence[str], folder: str, steps: int) -> list[RankOutcome]:
    """Load the checkpoint of some steps, take as many again; return the state before and after."""
    from ascend_run.core.checkpoint import FileStore, GroupRanks

    with training(values, enable) as run:
        with shards_of(run) as shards:
            store = FileStore(folder, layout=run.context.layout, ranks=GroupRanks())
            store.load(steps, shards)
        found = []
        for _ in range(2):
            with shards_of(run) as shards:
                found.append(outcome_of(shards))
            for _ in range(steps):
                run.step()
        with shards_of(run) as shards:
            return [*found[:1], outcome_of(shards)]


def reloaded(values: Values, enable: Sequence[str]) -> list[RankOutcome]:
    """Take steps, load other weights into the model, and return the state before and after a
    further step."""
    with training(values, enable) as run:
        optimizer: Any = run.bundle.optimizer
        found = []
        for _ in range(2):
            run.step()
        with torch.no_grad():
            for parameter in run.bundle.chunks[0].parameters():
                parameter.mul_(1.25)
        optimizer.reload_model_params()
        for _ in range(2):
            with shards_of(run) as shards:
                found.append(outcome_of(shards))
            run.step()
        return found


def live_tensors() -> list[Tensor]:
    """Return all tensors that the process holds."""
    gc.collect()
    return [o for o in gc.get_objects() if type(o) in (Tensor, torch.nn.Parameter)]


def storage_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of the tensors' storages, each counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _scale_loss(run: Training) -> None:
    """Scale the loss by a constant, as Megatron can in bf16 and a run's config does not; gradients
    are then looked through for infinity, and a step that has one is skipped."""
    from megatron.core.optimizer.grad_scaler import ConstantGradScaler

    parts: Any = run.bundle.optimizer.chained_optimizers  # type: ignore[union-attr]
    for part in parts:
        part.grad_scaler, part.found_inf = ConstantGradScaler(16.0), torch.zeros(1)


@contextmanager
def _overflow(run: Training, overflows: bool) -> Iterator[None]:
    """Make a gradient infinite when the optimizer gets it."""
    from ascend_run.testing.dry_run import gradient_of

    optimizer: Any = run.bundle.optimizer
    inner = optimizer.step

    def step() -> Any:
        for parameter in run.bundle.chunks[0].parameters():
            gradient = gradient_of(parameter)
            if overflows and gradient is not None:
                gradient.view(-1)[0] = torch.inf
        return inner()

    optimizer.step = step
    try:
        yield
    finally:
        optimizer.step = inner


def _digest(run: Training) -> str:
    digest = hashlib.sha256()
    with shards_of(run) as shards:
        for shard in sorted(shards, key=lambda p: (p.key, p.offset)):
            digest.update(f"{shard.key} {shard.offset}".encode())
            digest.update(shard.tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
