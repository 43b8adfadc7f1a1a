"""Execute the runs to compare, on ranks started for each run or on the ranks of a pool."""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from ascend_run.plugin_api.errors import AscendRunError, RankFailure
from ascend_run.testing.models import samples

from .questions import Side

if TYPE_CHECKING:
    from ascend_run.core.run import RunRequest
    from ascend_run.testing.dry_run import DryRun
    from ascend_run.testing.pool import GlooPool
    from ascend_run.tools.verify.capture.record import Record
    from ascend_run.types.data import Samples

_TARGET: Final = "ascend_run.tools.verify.ranks:probe_rank"

Fault = str | Callable[[], Any] | None


class Ranks(Protocol):
    """Executes the probes of a run and returns its records, by rank."""

    def __call__(self, side: Side, fault: Fault = None) -> list[Record]: ...


class NoVerdict(RankFailure):
    """One of the runs to compare did not finish."""

    exit_code: ClassVar[int] = 3


class LaunchedRanks:
    """Ranks of this machine, started for each run like those of training.

    Raises:
        NoVerdict: A rank failed for a reason that is not a user error.
    """

    def __call__(self, side: Side, fault: Fault = None) -> list[Record]:
        from ascend_run.launch.agent import launch_ranks
        from ascend_run.launch.options import LaunchOptions
        from ascend_run.prepare.rank_start import set_environment
        from ascend_run.tools.verify.capture.record import read_records

        before = dict(os.environ)
        folder = Path(tempfile.mkdtemp(prefix="ascend-run-verify-"))
        try:
            set_environment(side.prepare(), side.world_size)
            request = {"side": side.as_request(), "folder": str(folder), "fault": _name(fault)}
            try:
                launch_ranks(_TARGET, request, LaunchOptions(nproc=side.world_size))
            except RankFailure as error:
                if error.exit_code == AscendRunError.exit_code:  # a user error
                    raise
                raise NoVerdict(
                    f"no verdict, because this run failed: {side.name}", [str(error)]
                ) from None
            return read_records(folder, side.world_size)
        finally:
            os.environ.clear()
            os.environ.update(before)
            shutil.rmtree(folder, ignore_errors=True)


class PoolRanks:
    """The ranks of a pool.

    Args:
        timeout: Limit for one run. Unit: seconds.
    """

    def __init__(self, pool: GlooPool, timeout: float = 100.0) -> None:
        self.pool, self.timeout = pool, timeout

    def __call__(self, side: Side, fault: Fault = None) -> list[Record]:
        request = {"side": side.as_request(), "fault": _name(fault)}
        found: list[Record] = self.pool.run(
            pool_rank, side.world_size, request, timeout=self.timeout
        )
        return found


def probe_rank(request: Mapping[str, Any]) -> None:
    """Run the probes on a rank that was started for them; write its record to the request's
    folder."""
    from ascend_run.tools.verify.capture.record import write_record

    write_record(_probe(request, Path(request["folder"])), Path(request["folder"]))


def pool_rank(request: Mapping[str, object]) -> Record:
    """Run the probes on a rank of a pool; return its record."""
    import torch.distributed as dist

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size)  # the pool puts them back
    folder = Path(tempfile.mkdtemp(prefix="ascend-run-verify-"))
    try:
        return _probe(request, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _probe(request: Mapping[str, Any], folder: Path) -> Record:
    with warnings.catch_warnings():
        # Megatron warns of each missing optional library; none is needed here.
        warnings.filterwarnings("ignore", module=r"megatron\.")
        from ascend_run.tools.verify.capture.probe import run_probes

    side = Side.of_request(request["side"])
    side_values = {**side.values, "run.output_dir": str(folder / "run")}
    import attrs

    side = attrs.evolve(side, values=side_values)

    def make_request() -> RunRequest:
        return side.prepare().run_request()

    with _planted(request["fault"]):
        return run_probes(
            make_request, _kit_samples if side.uses_kit_batches else _task_samples, side.steps
        )


def _kit_samples(dry_run: DryRun, count: int) -> Samples:
    config = dry_run.context.config
    keys = {"model.vocab_size": config.model.vocab_size, "data.seq_length": config.data.seq_length}
    return samples(keys, count)


def _task_samples(dry_run: DryRun, count: int) -> Samples | None:
    from ascend_run.core.data.samples import build_datasets

    context = dry_run.context
    datasets = dry_run.task.datasets(context, count, 0)
    return build_datasets(context.config, datasets, count, 0).train


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


def _name(fault: Fault) -> str | None:
    if fault is None or isinstance(fault, str):
        return fault
    return f"{fault.__module__}:{fault.__qualname__}"
