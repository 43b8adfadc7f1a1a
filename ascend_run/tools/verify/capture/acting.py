"""Record the activity of a run: one counted training step, what listeners do, and a save."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ascend_run.core.train.checkpointing import Checkpoints
from ascend_run.core.train.data_parallel import gather_parameters
from ascend_run.core.train.readings import Readings
from ascend_run.core.train.step import StepResult, TrainStep, evaluate
from ascend_run.plugin_api import contracts as c
from ascend_run.testing.dry_run import DryRun
from ascend_run.testing.effects import count_both

from .activity import Activity, Observer, torch_settings, traffic
from .case_record import CaseRecord
from .cases import micro_batch_of

COUNTED: Final = 1
"""Index of the counted step: the first one with a learning rate above zero."""
_OWN_ENTRIES: Final = ("model", "optimizer", "progress", "rng")
_CHECKPOINTS: Final = "checkpoints"
_EVALUATION: Final = ("ascend_before_evaluation", "ascend_after_evaluation")


class Acting:
    """Records the activity of training steps; its methods are called in the order of a run.

    Args:
        cases: Filled with the micro-batches and the skipped steps.
        saves: Whether to save a checkpoint after the last step.
    """

    def __init__(
        self, dry_run: DryRun, train_step: TrainStep, cases: CaseRecord, *, saves: bool
    ) -> None:
        self.activity, self._cases = Activity(), cases
        self._dry_run, self._step = dry_run, train_step
        self._folder = Path(dry_run.context.config.run.output_dir)
        self._groups = [*dry_run.hooks.merge("ascend_metrics", context=dry_run.context)]
        self._readings = Readings(dry_run.context, train_step, dry_run.hooks)
        self._logged = dry_run.hooks.event("ascend_after_log")
        self._checkpoints = self._open_checkpoints() if saves else None
        self._entries: dict[str, str] = {}
        dry_run.hooks.event("ascend_before_run")(context=dry_run.context)

    def batches(self, batches: Iterator[c.Batch]) -> Iterator[c.Batch]:
        """Yield the batches, and note them."""
        digests: dict[str, Any] = {}
        for batch in batches:
            if (micro_batch := micro_batch_of(batch, self._dry_run.context.step)) is not None:
                self._cases.micro_batches.append(micro_batch)
            if self._dry_run.context.step == COUNTED:
                for name, value in _contents(batch).items():
                    digests.setdefault(name, hashlib.sha256()).update(value)
                found = {name: digest.hexdigest()[:16] for name, digest in digests.items()}
                self.activity.batch = found
            yield batch

    @contextmanager
    def step(self, index: int) -> Iterator[None]:
        """Enter around every step; counts if it is the one to count."""
        if index != COUNTED:
            yield
            return
        self.activity.settings = torch_settings()
        observer = Observer()
        with count_both(observer.see) as (operations, seen):
            yield
        self.activity.operations = dict(operations - seen.calls)
        self.activity.passive = sorted(observer.passive)
        self.activity.collectives = traffic(seen)
        self.activity.copies, self.activity.saved_bytes = observer.copies, observer.saved_bytes

    def stepped(self, result: StepResult) -> None:
        """Call after each step: logs it, as with ``train.log_interval=1``."""
        self._cases.skipped += result.skipped
        self._readings.add(result)
        metrics = self._readings.collect(result)
        for name, value in metrics.items():
            if name.partition("/")[0] in self._groups and isinstance(value, int | float):
                self.activity.metrics.setdefault(name, []).append(float(value))
        self._logged(context=self._dry_run.context, metrics=metrics)
        if self._checkpoints is not None:
            self._compare_entries(self._checkpoints)

    def finish(self, batches: Callable[[], Iterator[c.Batch]]) -> None:
        """Evaluate and save, where something listens to it, and end the run.

        Args:
            batches: Returns the batches to evaluate.
        """
        hooks, context = self._dry_run.hooks, self._dry_run.context
        gather_parameters(self._dry_run.bundle)
        if any(map(hooks.implements, _EVALUATION)):
            hooks.event("ascend_before_evaluation")(context=context)
            count = self._dry_run.plan.num_microbatches
            found = evaluate(self._step.forward_backward, batches(), 1, count)
            after = hooks.event("ascend_after_evaluation")
            after(context=context, loss=found.loss, metrics=found.metrics)
        if self._checkpoints is not None:
            self._save(self._checkpoints)
        for error in hooks.notify_all("ascend_after_run", context=context):
            raise error
        dist.barrier()  # every rank has written its files
        self.activity.files = dict(self._files())
        dist.barrier()  # before the folder is removed

    def _open_checkpoints(self) -> Checkpoints:
        return Checkpoints(self._dry_run.hooks, self._dry_run.context, self._folder)

    def _save(self, checkpoints: Checkpoints) -> None:
        with checkpoints.state() as (shards, _):
            self.activity.checkpoint = sorted({shard.key for shard in shards})
        with count_both() as (_, seen):
            path = checkpoints.save()
        self.activity.saving = traffic(seen)
        event = self._dry_run.hooks.event("ascend_after_checkpoint")
        event(context=self._dry_run.context, path=path)

    def _compare_entries(self, checkpoints: Checkpoints) -> None:
        """Note the entries of plugins whose tensors differ from those after the step before."""
        with checkpoints.state() as (shards, _):
            for shard in shards:
                if shard.key.partition("/")[0].partition(".")[0] in _OWN_ENTRIES:
                    continue
                tensor = shard.tensor if shard.read is None else shard.read()
                if not tensor.is_floating_point():  # it may count steps
                    continue
                key, digest = f"{shard.key} {shard.offset}", _digest(tensor)
                if self._entries.setdefault(key, digest) != digest:
                    self.activity.growing = sorted({*self.activity.growing, shard.key})
                self._entries[key] = digest

    def _files(self) -> Iterator[tuple[str, int]]:
        for path in sorted(self._folder.rglob("*")):
            name = path.relative_to(self._folder)
            if path.is_file() and name.parts[0] != _CHECKPOINTS and path.stat().st_size:
                yield str(name), path.stat().st_size


def _contents(batch: c.Batch) -> Mapping[str, bytes]:
    found = {name: _bytes(tensor) for name, tensor in batch.tensors.items()}
    if batch.document_ends is not None:
        found["document_ends"] = repr(batch.document_ends).encode()
    return found


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() + repr(tuple(tensor.shape)).encode()


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(_bytes(tensor)).hexdigest()[:16]
