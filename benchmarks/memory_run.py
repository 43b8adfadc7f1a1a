"""Run two steps on one rank; measure persistent tensors, and track all storages of the second
step."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ascend_run.core.hooks import Hooks
from ascend_run.core.run import prepared_rank
from ascend_run.core.train.seeding import seed_everything
from ascend_run.ops.linear.stored_weight import held_tensors
from ascend_run.plugin_api import RunContext
from ascend_run.prepare.config.raw import RawConfig, RawValue
from ascend_run.prepare.prepare import prepare_raw
from ascend_run.testing.dry_run import DryRun

from .live_storages import LiveStorages, mapped_files
from .memory_worker import Measured

_APART: Final = (type, ModuleType, FunctionType, torch.nn.Module, torch.Generator)
"""What an optimizer refers to that is not its own, such as the model."""


def two_steps(config: Mapping[str, Any], plugins: Sequence[str]) -> Measured:
    """Train two steps and track the second, in which the optimizer state exists."""
    with run_of_rank(config, plugins) as (hooks, context):
        return _watched(hooks, context)


@contextmanager
def run_of_rank(
    config: Mapping[str, Any], plugins: Sequence[str]
) -> Iterator[tuple[Hooks, RunContext]]:
    """Prepare a run of the default process group on this rank, and seed it."""
    with _rank_variables():
        values = {"data.train": ["none"], "platform": "cpu", **config, "enable": [*plugins]}
        given = {key: RawValue(value, "the benchmark") for key, value in values.items()}
        prepared = prepare_raw(RawConfig(values=given), dist.get_world_size())
        with prepared_rank(prepared.run_request()) as (hooks, context):
            seed_everything(context.config, context.layout)
            yield hooks, context


def _watched(hooks: Any, context: Any) -> Measured:
    config = context.config
    dry_run = DryRun(hooks, context)
    dry_run.build()
    step, bundle = dry_run.train_step(), dry_run.bundle
    dataset = dry_run.samples(2 * config.train.global_batch_size)
    assert dataset is not None, "no steps"
    batches = dry_run.batches(dataset)
    dry_run.step(step, batches)
    weights = [held for chunk in bundle.chunks for held in _weights(chunk)]
    buffers = list(_gradient_buffers(bundle.chunks))
    others = [b for chunk in bundle.chunks for b in _other_tensors(chunk)]
    frozen = [one for one in context.models.values() if one.frozen]
    for chunk in (chunk for one in frozen for chunk in one.chunks):
        others += [*_weights(chunk), *_other_tensors(chunk)]
    bundle.optimizer.zero_grad()
    there = [*weights, *buffers, *others]
    optimizer = _without(_reached_from(bundle.optimizer, states_only=True), there)
    in_file = mapped_files()
    seen = LiveStorages([*there, *_reached_from(bundle.optimizer, states_only=False)])
    dry_run.step(step, batches, seen)
    return Measured(
        weights=_nbytes(weights),
        gradients=_nbytes(buffers),
        optimizer=_nbytes(tensor for tensor in optimizer if not in_file(tensor)),
        files=_nbytes(filter(in_file, optimizer)),
        peak=seen.peak,
    )


def _weights(chunk: Any) -> list[Tensor]:
    return [held for parameter in chunk.parameters() for held in held_tensors(parameter)]


def _gradient_buffers(chunks: Sequence[Any]) -> Iterator[Tensor]:
    """Gradient buffers of Megatron's DDP, if there are any."""
    for chunk in chunks:
        for name in ("buffers", "expert_parallel_buffers"):
            found = getattr(chunk, name, ())
            yield from (buffer.grad_data for buffer in (found if isinstance(found, list) else ()))


def _reached_from(root: object, *, states_only: bool) -> list[Tensor]:
    """Return the tensors that an object refers to, also by other objects: of an optimizer between
    steps its states, step counts and master weights as they then are; with buffers of its own.

    Args:
        states_only: Leave out what torch's optimizers have beside states and parameters.
    """
    found, seen, waiting = list[Tensor](), set[int](), [root]
    while waiting:
        here = waiting.pop()
        if id(here) in seen or isinstance(here, _APART):
            continue
        seen.add(id(here))
        if isinstance(here, Tensor):
            found.append(here)
        if states_only and isinstance(here, torch.optim.Optimizer):
            waiting += [here.state, here.param_groups]
        else:
            waiting += gc.get_referents(here)
    return found


def _without(tensors: Iterable[Tensor], others: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that share no storage with others."""
    known = {tensor.untyped_storage()._cdata for tensor in others}
    return [t for t in tensors if t.untyped_storage()._cdata not in known]


def _other_tensors(chunk: Any) -> Iterator[Tensor]:
    """Buffers and tables of modules."""
    for module in chunk.modules():
        yield from module.buffers(recurse=False) if module is not chunk else ()
        cache = getattr(module, "_cache", None)
        yield from cache.values() if isinstance(cache, dict) else ()


def _nbytes(tensors: Iterable[Tensor]) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@contextmanager
def _rank_variables() -> Iterator[None]:
    """Set the environment variables that a launcher sets for this rank."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    before = dict(os.environ)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
