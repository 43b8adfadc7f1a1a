"""Train on one rank as a run does, and record what every step read and computed, and the state."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from ascend_run.core.checkpoint.entries import EntryShards
from ascend_run.core.hooks import Hooks
from ascend_run.core.rank.failures import FILE_VARIABLE
from ascend_run.core.run import run_training
from ascend_run.core.train.checkpointing import Checkpoints
from ascend_run.core.train.data_parallel import gather_parameters
from ascend_run.ops.linear.stored_weight import held_tensors
from ascend_run.plugin_api import Batch, Manifest, RunContext, Wrapper, hookimpl
from ascend_run.prepare.prepare import PreparedRun

from .training_record import RunState, TrainedStep, TrainingRecord

_DIGEST_BYTES: Final = 8


def train(prepared: PreparedRun, until: int) -> TrainingRecord:
    """Train as ``ascend-run`` does, on a rank that exists, and stop early.

    So the data has more samples than the steps need, as in a run that is interrupted.

    Args:
        until: Stop after this step; if checkpoints are saved, after the one of this step.
    """
    request = prepared.run_request()
    watch = _Watch(request.plugins, until)
    output = io.StringIO()
    with (
        _without_failure_file(),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
        contextlib.suppress(_Stop),
    ):
        run_training(attrs.evolve(request, plugins=[*request.plugins, watch]))
    return watch.record()


@contextlib.contextmanager
def _without_failure_file() -> Iterator[None]:
    """Let the stop not be recorded as this rank's failure; other errors are recorded outside."""
    before = os.environ.pop(FILE_VARIABLE, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[FILE_VARIABLE] = before


class _Stop(Exception):
    """Ends the run."""


class _Watch:
    """A plugin that records the run. As the last one it sees the batches that the run reads."""

    manifest = Manifest(name="watch", summary="record a run")

    def __init__(self, plugins: Sequence[Any], until: int) -> None:
        self._plugins, self._until = plugins, until
        self._rank = self._first_step = 0
        self._rows: list[str] = []
        self._rows_of: dict[int, list[str]] = {}
        self._steps: dict[int, TrainedStep] = {}
        self._states: list[RunState] = []

    def record(self) -> TrainingRecord:
        """Return the record of the run, which has ended."""
        start, end = self._states
        return TrainingRecord(
            rank=self._rank, first_step=self._first_step, start=start, steps=self._steps, end=end
        )

    @hookimpl
    def ascend_batch(self) -> Wrapper[Iterator[Batch]]:
        def watched(batches: Iterator[Batch]) -> Iterator[Batch]:
            for batch in batches:
                self._rows += row_hashes(batch)
                yield batch

        return watched

    @hookimpl
    def ascend_before_run(self, context: RunContext) -> None:
        self._rank, self._first_step = context.layout.rank, context.step
        self._states.append(self._state(context))

    @hookimpl
    def ascend_after_step(self, context: RunContext) -> None:
        draw_from_every_stream(context)
        self._rows_of[context.step], self._rows = self._rows, []

    @hookimpl
    def ascend_after_log(self, context: RunContext, metrics: Mapping[str, Any]) -> None:
        self._steps[context.step] = TrainedStep(
            rows=self._rows_of[context.step],
            loss=metrics["loss"],
            grad_norm=metrics["grad_norm"],
        )
        if context.step == self._until and not context.config.checkpoint.save_interval:
            raise _Stop

    @hookimpl
    def ascend_after_checkpoint(self, context: RunContext) -> None:
        if context.step == self._until:
            raise _Stop

    @hookimpl
    def ascend_after_run(self, context: RunContext) -> None:
        if self._states:  # else the run failed before its first step
            for bundle in context.models.values():
                if bundle.trains:
                    gather_parameters(bundle)
            self._states.append(self._state(context))

    def _state(self, context: RunContext) -> RunState:
        # Without the plugins' filters, which leave out tensors that are restored otherwise.
        own = Checkpoints(Hooks([]), context, Path(context.config.run.output_dir))
        added = Hooks(self._plugins).merge("ascend_checkpoint_entries", context=context)
        entries = EntryShards(added, context.layout.rank)
        with own.state() as (shards, values):
            saved = {f"{p.key} {p.offset}": p.tensor for p in (*shards, *entries.shards)}
            tensors = {name: tensor.detach().cpu().clone() for name, tensor in saved.items()}
        for role, bundle in context.models.items():
            for index, chunk in enumerate(bundle.chunks):
                for name, held in (*chunk.named_parameters(), *chunk.named_buffers()):
                    for part, tensor in enumerate(held_tensors(held)):
                        key = f"model/chunk {index} of {role}: {name}{f' {part}' if part else ''}"
                        tensors[key] = tensor.detach().cpu().clone()
        return RunState(
            tensors=tensors,
            values={**values, **entries.values},
            attributes=dict(_attributes(self._plugins)),
        )


def draw_from_every_stream(context: RunContext) -> None:
    """Advance every random stream: one that no step draws from would seem to be restored.

    Normal variates are made in pairs. Step n draws n of them, so an odd number up to a stop after
    two steps, where the second of a pair is part of the state.
    """
    for _ in range(context.step):
        random.gauss(0.0, 1.0)
        np.random.standard_normal()
    device, tracker = context.device.torch_device, get_cuda_rng_tracker()
    for where in {torch.device("cpu"), device}:
        torch.rand((), device=where)
    for name in tracker.get_states():
        with tracker.fork(name):
            torch.rand((), device=device)


def row_hashes(batch: Batch) -> list[str]:
    """Return a hash of every row of a micro-batch, over all of its fields."""
    hashes: list[Any] = []
    for name, tensor in sorted(batch.tensors.items()):
        for row, values in enumerate(tensor.unbind() if tensor.dim() else [tensor]):
            if row == len(hashes):
                hashes.append(hashlib.blake2b(digest_size=_DIGEST_BYTES))
            hashes[row].update(name.encode())
            hashes[row].update(_bytes(values))
    return [found.hexdigest() for found in hashes]


def _bytes(values: Tensor) -> bytes:
    flat = values.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def _attributes(plugins: Sequence[Any]) -> Iterator[tuple[str, str]]:
    for plugin in plugins:
        for name, value in sorted(getattr(plugin, "__dict__", {}).items()):
            if isinstance(value, bool | int | float | str):
                yield f"{plugin.manifest.name}.{name}", repr(value)
