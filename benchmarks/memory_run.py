"""Run two steps on one rank; measure persistent tensors, and track all storages of the second
step."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor

from ascend_run.core.checkpoint.optimizer_shards import materialized
from ascend_run.core.hooks import Hooks
from ascend_run.core.run import prepared_rank
from ascend_run.core.train.seeding import seed_everything
from ascend_run.plugin_api import RunContext
from ascend_run.prepare.config.raw import RawConfig, RawValue
from ascend_run.prepare.prepare import prepare_raw
from ascend_run.testing.dry_run import DryRun
from ascend_run.testing.models import samples

from .live_storages import LiveStorages, mapped_files
from .memory_worker import Measured

MADE_FOR_A_STEP: Final = frozenset({"reuse-fp32-param"})
"""Plugins whose master weights exist during a step alone, so that nothing of them is elsewhere."""


def two_steps(config: Mapping[str, Any], plugins: Sequence[str]) -> Measured:
    """Train two steps and track the second, in which the optimizer state exists."""
    with run_of_rank(config, plugins) as (hooks, context):
        return _watched(config, hooks, context)


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


def _watched(given: Mapping[str, Any], hooks: Any, context: Any) -> Measured:
    config = context.config
    dry_run = DryRun(hooks, context)
    dry_run.build()
    step, bundle = dry_run.train_step(), dry_run.bundle
    batches = dry_run.batches(samples(given, 2 * config.train.global_batch_size))
    dry_run.step(step, batches)
    weights = [p for chunk in bundle.chunks for p in chunk.parameters()]
    buffers = list(_gradient_buffers(bundle.chunks))
    names = {plugin.manifest.name for plugin in hooks.plugins}
    optimizer = _optimizer_state(bundle.optimizer, weights, names)
    others = [b for chunk in bundle.chunks for b in _other_tensors(chunk)]
    bundle.optimizer.zero_grad()
    in_file = mapped_files()
    seen = LiveStorages([*weights, *buffers, *optimizer, *others])
    dry_run.step(step, batches, seen)
    return Measured(
        weights=_nbytes(weights),
        gradients=_nbytes(buffers),
        optimizer=_nbytes(tensor for tensor in optimizer if not in_file(tensor)),
        files=_nbytes(filter(in_file, optimizer)),
        peak=seen.peak,
    )


def _gradient_buffers(chunks: Sequence[Any]) -> Iterator[Tensor]:
    """Gradient buffers of Megatron's DDP, if there are any."""
    for chunk in chunks:
        for name in ("buffers", "expert_parallel_buffers"):
            found = getattr(chunk, name, ())
            yield from (buffer.grad_data for buffer in (found if isinstance(found, list) else ()))


def _optimizer_state(optimizer: Any, weights: Sequence[Tensor], names: Set[str]) -> list[Tensor]:
    """Moments, step counts and master weights, wherever they are; not the weights themselves.

    Args:
        names: Plugins of the run.
    """
    own = {weight.untyped_storage()._cdata for weight in weights}
    if names & MADE_FOR_A_STEP:
        return _held(optimizer, own)
    with materialized(optimizer):
        return _held(optimizer, own)


def _held(optimizer: Any, own: Collection[int]) -> list[Tensor]:
    """Return master weights and states.

    Args:
        own: Storages of the model's weights.
    """
    inner = [part.optimizer for part in optimizer.chained_optimizers]
    parameters = [p for one in inner for group in one.param_groups for p in group["params"]]
    states = [value for one in inner for state in one.state.values() for value in state.values()]
    masters = [p.data for p in parameters if p.untyped_storage()._cdata not in own]
    return masters + [value for value in states if isinstance(value, Tensor)]


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
