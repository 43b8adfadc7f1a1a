"""What a rank executes for ``verify``: probes of a run, or the run. Imports torch when called."""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from .questions import Side

if TYPE_CHECKING:
    from torch import Tensor

    from ascend_run.testing.dry_run import DryRun
    from ascend_run.tools.verify.capture.record import Record
    from ascend_run.tools.verify.capture.training_record import TrainingRecord
    from ascend_run.types.data import Samples

PRELOAD: Final = "ascend_run.tools.verify.capture.probe"
"""What takes a rank long to import."""


@attrs.frozen(kw_only=True)
class Job:
    """What the ranks of one run execute. Serializable as JSON, to send it to them."""

    side: Side
    """The run."""
    fault: str | None = None
    """Function that plants a fault in it, as ``module:name``."""
    until: int | None = None
    """Train as the run does, until after this step; None: execute its probes."""
    folder: str = ""
    """Where each rank writes its record; empty: it returns it."""
    num_threads: int | None = None
    """Of each rank; None: as started."""

    def as_request(self) -> dict[str, object]:
        return attrs.asdict(self)

    @classmethod
    def of_request(cls, request: Mapping[str, Any]) -> Job:
        return cls(**{**request, "side": Side.of_request(request["side"])})


def to_files(request: Mapping[str, Any]) -> None:
    """Execute a job on a rank that was started for it; write the record to the job's folder."""
    _to_files(Job.of_request(request))


def to_files_in_pool(request: Mapping[str, Any]) -> None:
    """Execute a job on a rank of a pool; write the record to the job's folder."""
    import torch

    job = Job.of_request(request)
    _set_rank()
    if job.num_threads is not None:
        torch.set_num_threads(job.num_threads)
    _to_files(job)


def in_pool(request: Mapping[str, Any]) -> Record | TrainingRecord:
    """Execute a job on a rank of a pool; return its record."""
    import torch.distributed as dist

    _set_rank()
    job = Job.of_request(request)
    if job.until is not None:
        return _train(job, job.until)
    made = [tempfile.mkdtemp(prefix="ascend-run-verify-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(made)  # the ranks of a run share its folder
    folder = Path(made[0])
    try:
        return _probe(job, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _to_files(job: Job) -> None:
    from ascend_run.tools.verify.capture.record import write_record

    folder = Path(job.folder)
    if job.until is not None:
        from ascend_run.tools.verify.capture.training_record import write_training_record

        write_training_record(_train(job, job.until), folder)
    else:
        write_record(_probe(job, folder), folder)


def _set_rank() -> None:
    import torch.distributed as dist

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size)  # the pool puts them back


def _train(job: Job, until: int) -> TrainingRecord:
    with _quiet_imports():
        from ascend_run.tools.verify.capture.training_run import train

    with _planted(job.fault):
        return train(job.side.prepare(), until)


def _probe(job: Job, folder: Path) -> Record:
    with _quiet_imports():
        from ascend_run.tools.verify.capture.probe import run_probes

    run = folder / "run"
    own = {"run.output_dir": str(run), "checkpoint.save": str(run / "checkpoints")}
    side = attrs.evolve(job.side, values={**job.side.values, **own})
    kept: dict[int, dict[str, Tensor]] = {}

    def make_dataset(dry_run: DryRun, count: int) -> Samples | None:
        made = dry_run.samples if side.uses_kit_batches else dry_run.task_samples
        dataset = made(count)
        if side.keeps_samples and dataset is not None and count not in kept:
            kept[count] = _stacked(dataset, count)
        return dataset

    with _planted(job.fault):
        record = run_probes(
            side.run_request,
            make_dataset,
            side.steps,
            only_steps=side.only_steps,
            saves=side.saves,
            probe_inputs=side.uses_kit_batches,
            by_differences=side.by_differences,
            only_masks=side.only_masks,
        )
    if kept:
        size = min(kept)
        record.first_samples, record.samples = kept[size], kept[size * side.steps]
    return record


def _stacked(dataset: Samples, count: int) -> dict[str, Tensor]:
    """Return each field of the first samples, [count, S]."""
    import torch

    samples = [dataset[index] for index in range(count)]
    return {name: torch.stack([one[name] for one in samples]) for name in samples[0]}


@contextmanager
def _quiet_imports() -> Iterator[None]:
    """Ignore the warnings of Megatron about each missing optional library; none is needed here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.")
        yield


@contextmanager
def _planted(fault: str | None) -> Iterator[None]:
    """Plant a fault by calling the named function; undo it with the function that this returns."""
    if fault is None:
        yield
        return
    module, _, function = fault.partition(":")
    found: Any = importlib.import_module(module)
    for part in function.split("."):
        found = getattr(found, part)
    undo = found()
    try:
        yield
    finally:
        if undo is not None:
            undo()
