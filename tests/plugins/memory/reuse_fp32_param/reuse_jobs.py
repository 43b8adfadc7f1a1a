"""Jobs for gloo ranks: steps, some of them skipped, and checkpoints."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor

from ascend_run.plugin_api import TensorShard
from ascend_run.testing.runtime import RankOutcome
from tests.support.small_runs import Training, Values, outcome_of, training


@attrs.frozen
class Steps:
    """What a rank had after each step."""

    readings: list[tuple[Any, ...]]
    """Loss, gradient norm and whether it was skipped."""
    digests: list[str]
    """Of every tensor of the checkpoint, master weights and moments included."""
    num_aside: int
    """Values that were kept aside, over all steps."""
    state_bytes: int
    """Bytes of the optimizer's states and of what it keeps of master weights."""
    live_bytes: int
    """Bytes of all tensors that the job holds between steps."""


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


def stepwise(
    values: Values, enable: Sequence[str], steps: int, overflowing: Collection[int], every: int
) -> Steps:
    """Take steps, some of which overflow; look at the state every so many steps."""
    before = _live_bytes()
    with training(values, enable) as run:
        if overflowing:
            _scale_loss(run)
        readings, digests, num_aside = [], [], 0
        for step in range(1, steps + 1):
            with _overflow(run, step in overflowing):
                result = run.step()
            readings.append((result.loss, result.grad_norm, result.skipped))
            num_aside += sum(residual.num_aside for residual in _residuals(run))
            if step % every == 0:
                digests.append(_digest(run))
        run.bundle.optimizer.zero_grad()  # type: ignore[union-attr]
        return Steps(readings, digests, num_aside, _state_bytes(run), _live_bytes() - before)


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


def resting_ties(values: Values, enable: Sequence[str]) -> list[str]:
    """Set some master weights to exact ties, take steps without gradients, and return the
    parameters that are no longer the same; their second moments are zero all the time."""
    from ascend_run.core.checkpoint.optimizer_shards import materialized, stepped_parameters

    with training(values, enable) as run:
        optimizer: Any = run.bundle.optimizer
        names = {id(p): name for name, p in run.bundle.chunks[0].named_parameters()}
        with torch.no_grad(), materialized(optimizer):
            for item in stepped_parameters(optimizer):
                bits = item.stepped.view(-1).view(torch.int32)[::20]
                bits.bitwise_and_(-65536).bitwise_or_(0x8000)
            optimizer.chained_optimizers[0].refresh()
            want = {id(i.stepped): i.stepped.clone() for i in stepped_parameters(optimizer)}
        for _ in range(3):
            for chunk in run.bundle.chunks:
                chunk.zero_grad_buffer()
            for parameter in run.bundle.chunks[0].parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        with materialized(optimizer):
            return [
                names[id(item.parameter)]
                for item in stepped_parameters(optimizer)
                if not torch.equal(item.stepped, want[id(item.stepped)])
                or item.inner.state[item.stepped]["exp_avg_sq"].any()
            ]


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


def _residuals(run: Training) -> list[Any]:
    parts = run.bundle.optimizer.chained_optimizers  # type: ignore[union-attr]
    return [one for part in parts for one in getattr(part, "_residuals", {}).values()]


def _state_bytes(run: Training) -> int:
    from ascend_run.core.checkpoint.optimizer_shards import stepped_parameters

    items = [*stepped_parameters(run.bundle.optimizer)]
    held = [tensor for item in items for tensor in item.inner.state[item.stepped].values()]
    held += [item.stepped for item in items if item.stepped.dtype != item.parameter.dtype]
    return _storage_bytes(held) + sum(residual.nbytes for residual in _residuals(run))


def _live_bytes() -> int:
    gc.collect()
    return _storage_bytes([o for o in gc.get_objects() if type(o) in (Tensor, torch.nn.Parameter)])


def _storage_bytes(tensors: Sequence[Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
