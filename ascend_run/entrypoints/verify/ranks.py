"""Where the runs are made: on ranks started for each, or on a pool's."""

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
from ascend_run.plugin_api.testing.models import samples

from .questions import Side

if TYPE_CHECKING:
    from ascend_run.core.run import RunRequest
    from ascend_run.core.verify.record import Record
    from ascend_run.plugin_api.testing.pool import GlooPool

_TARGET: Final = "ascend_run.entrypoints.verify.ranks:probe_rank"

Fault = str | Callable[[], Any] | None


class Ranks(Protocol):
    """Makes a run's probes; its records, by rank."""

    def __call__(self, side: Side, fault: Fault = None) -> list[Record]: ...


class NoVerdict(RankFailure):
    """A run that is to be compared did not come to its end."""

    exit_code: ClassVar[int] = 3


class LaunchedRanks:
    """Ranks of this machine, started for each run as training starts them.

    Raises:
        NoVerdict: A rank failed by what is not the user's to mend.
    """

    def __call__(self, side: Side, fault: Fault = None) -> list[Record]:
        from ascend_run.core.launch.agent import launch_ranks
        from ascend_run.core.launch.options import LaunchOptions
        from ascend_run.core.verify.record import read_records
        from ascend_run.entrypoints.rank_start import set_environment

        before = dict(os.environ)
        folder = Path(tempfile.mkdtemp(prefix="ascend-run-verify-"))
        try:
            set_environment(side.prepare(), side.world_size)
            request = {"side": side.as_request(), "folder": str(folder), "fault": _name(fault)}
            try:
                launch_ranks(_TARGET, request, LaunchOptions(nproc=side.world_size))
            except RankFailure as error:
                if error.exit_code == AscendRunError.exit_code:  # the user's to mend
                    raise
                raise NoVerdict(
                    f"no verdict, as this run failed: {side.name}", [str(error)]
                ) from None
            return read_records(folder, side.world_size)
        finally:
            os.environ.clear()
            os.environ.update(before)
            shutil.rmtree(folder, ignore_errors=True)


class PoolRanks:
    """The ranks of a pool.

    Args:
        timeout: Unit: seconds, for one run.
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
    """One rank that was started for it: its record goes to the request's folder."""
    from ascend_run.core.verify.record import write_record

    write_record(_probe(request, Path(request["folder"])), Path(request["folder"]))


def pool_rank(request: Mapping[str, Any]) -> Record:
    """One rank of a pool."""
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
        # Megatron warns of each optional library that it does without; none is needed here.
        warnings.filterwarnings("ignore", module=r"megatron\.")
        from ascend_run.core.verify.probe import run_probes

    side = Side.of_request(request["side"])
    side_values = {**side.values, "run.output_dir": str(folder / "run")}
    import attrs

    side = attrs.evolve(side, values=side_values)

    def make_request() -> RunRequest:
        return side.prepare().run_request()

    with _planted(request["fault"]):
        return run_probes(
            make_request, _kit_samples if side.uses_kit_batches else _own_samples, side.steps
        )


def _kit_samples(rehearsal: Any, count: int) -> Any:
    config = rehearsal.context.config
    keys = {"model.vocab_size": config.model.vocab_size, "data.seq_length": config.data.seq_length}
    return samples(keys, count)


def _own_samples(rehearsal: Any, count: int) -> Any:
    from ascend_run.core.data.samples import build_datasets

    context = rehearsal.context
    datasets = rehearsal.task.datasets(context, count, 0)
    storage = rehearsal.hooks.provide("ascend_dataset", config=context.config)
    return build_datasets(context.config, datasets, count, 0, storage=storage).train


@contextmanager
def _planted(fault: str | None) -> Iterator[None]:
    """Call what a name names, and undo it by what that answers."""
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
