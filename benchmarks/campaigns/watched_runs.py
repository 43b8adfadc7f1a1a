"""Whole runs on the ranks of a pool, and all that they held when they ended."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import attrs

from ascend_run.core.log.metrics import read_metrics
from ascend_run.plugin_api import Manifest, RunContext, hookimpl

from .tiny_runs import prepare

if TYPE_CHECKING:
    from torch import Tensor

    from ascend_run.plugin_api.contracts import TensorShard
    from ascend_run.plugin_api.manifest import EnabledPlugin

T = TypeVar("T", bound="EnabledPlugin")
_OF_THE_CLOCK: Final = (
    "memory_bytes",
    "memory_peak_bytes",
    "step_seconds",
    "time",
    "tokens_per_second",
)


@attrs.frozen
class Ended:
    """What one rank held."""

    tensors: Mapping[str, Tensor]
    """Weights and buffers, the optimizer's state, random generators, entries of plugins."""
    values: Mapping[str, Any]
    """The same, of what is no tensor: steps and samples, the schedule, the scale of the loss."""


class Watch:
    """A plugin that keeps what a run holds at its end."""

    manifest = Manifest(name="watch", summary="keep the end of a run")

    def __init__(self, plugins: Sequence[Any]) -> None:
        self.plugins = plugins
        self.ended: Ended | None = None

    @hookimpl
    def ascend_after_run(self, context: RunContext) -> None:
        from ascend_run.ops.linear.stored_weight import held_tensors

        with run_state(self.plugins, context) as (shards, values):
            tensors = {f"{p.key} {p.offset}": p.tensor for p in shards}
            kept = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        for role, bundle in context.models.items():
            for index, chunk in enumerate(bundle.chunks):
                for name, held in (*chunk.named_parameters(), *chunk.named_buffers()):
                    for part, tensor in enumerate(held_tensors(held)):
                        key = f"{role}, chunk {index}: {name}, {part}"
                        kept[key] = tensor.detach().clone()
        self.ended = Ended(kept, values)


@contextmanager
def run_state(
    plugins: Sequence[Any], context: RunContext
) -> Iterator[tuple[list[TensorShard], dict[str, Any]]]:
    """Give this rank's shards of all that a checkpoint would hold, in the run's own memory, and the
    values that are no tensors."""
    from ascend_run.core.checkpoint.entries import EntryShards
    from ascend_run.core.hooks import Hooks
    from ascend_run.core.train.checkpointing import Checkpoints

    # Without the plugins nothing is left out of what a checkpoint would hold of the models.
    own = Checkpoints(Hooks([]), context, Path(context.config.run.output_dir))
    added = Hooks(plugins).merge("ascend_checkpoint_entries", context=context)
    entries = EntryShards(added, context.layout.rank)
    with own.state() as (shards, values):
        yield [*shards, *entries.shards], {**values, **entries.values}


def watched_run(folder: Path, asked: Mapping[str, Any]) -> Ended:
    """A job: train on the ranks that are there, or on one; return what this rank held at the end.

    Args:
        folder: Of the data.
        asked: Arguments of ``tiny_runs.prepare``.
    """
    watch = train_beside(Watch, folder, asked)
    assert watch.ended is not None
    return watch.ended


def train_beside(
    watching: Callable[[Sequence[Any]], T], folder: Path, asked: Mapping[str, Any]
) -> T:
    """Train on the ranks that are there, or on one, with a plugin that sees it; return that.

    Args:
        watching: Makes the plugin, from those of the run.
        folder: Of the data.
        asked: Arguments of ``tiny_runs.prepare``.
    """
    import torch.distributed as dist

    size = 1
    if dist.is_initialized():
        rank, size = str(dist.get_rank()), dist.get_world_size()
        # The pool puts them back.
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(size))
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")  # Megatron's own, of what it does without
        from ascend_run.core.run import run_training

        prepared = prepare(folder, **asked, world_size=size)
        request = prepared.run_request()
        watch = watching(request.plugins)
        run_training(attrs.evolve(request, plugins=[*request.plugins, watch]))
    return watch


def readings(run: Path) -> list[dict[str, Any]]:
    """Of every step, in order: what the log has but for the clock, then the fingerprints, with the
    hash of the rows that were read. Without what plugins say of their own work (``name/reading``),
    such as messages sent since this process began."""
    records = [
        record
        for name in ("metrics.jsonl", "fingerprint.jsonl")
        for record in read_metrics(run / name).records
    ]
    return [
        {k: v for k, v in record.items() if k not in _OF_THE_CLOCK and "/" not in k}
        for record in records
    ]


def resumed_at(run: Path) -> list[int]:
    """Steps of the checkpoints that a run went on from."""
    events = read_metrics(run / "metrics.jsonl").events
    return [event["step"] for event in events if event["event"] == "resume"]


def differences(ones: Sequence[Ended], others: Sequence[Ended]) -> Iterator[str]:
    """What of the second run is not the first one's, rank by rank."""
    import torch

    for rank, (one, other) in enumerate(zip(ones, others, strict=True)):
        for key in sorted({*one.tensors, *other.tensors}):
            first, second = one.tensors.get(key), other.tensors.get(key)
            if first is None or second is None:
                yield f"rank {rank}: {key} is of one run only"
            elif first.dtype != second.dtype or not torch.equal(first, second):
                yield f"rank {rank}: {key} differs"
        for name in sorted({*one.values, *other.values}):
            if one.values.get(name) != other.values.get(name):
                yield (
                    f"rank {rank}: '{name}' is {other.values.get(name)!r}, "
                    f"not {one.values.get(name)!r}"
                )
