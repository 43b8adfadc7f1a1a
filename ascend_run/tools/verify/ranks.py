"""Execute the runs to compare, on ranks started for each run or on the ranks of a pool."""

from __future__ import annotations

import os
import shutil
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from ascend_run.plugin_api.errors import AscendRunError, RankFailure

from . import rank_jobs
from .questions import Side
from .rank_jobs import Job

if TYPE_CHECKING:
    from ascend_run.prepare.prepare import PreparedRun
    from ascend_run.testing.pool import GlooPool
    from ascend_run.tools.verify.capture.record import Record
    from ascend_run.tools.verify.capture.training_record import TrainingRecord

_TARGET: Final = f"{rank_jobs.__name__}:{rank_jobs.to_files.__name__}"

Fault = str | Callable[[], Any] | None


class Ranks(Protocol):
    """Executes runs and returns their records, by rank."""

    @abstractmethod
    def __call__(self, side: Side, fault: Fault = None) -> list[Record]:
        """Execute the probes of a run.

        Args:
            fault: Fault to plant in the run; see the package's docstring.
        """

    @abstractmethod
    def train(
        self, side: Side, until: int, fault: Fault = None, *, new: bool = False
    ) -> list[TrainingRecord]:
        """Execute a run as it is, and stop it early.

        Args:
            until: Stop after this step; if checkpoints are saved, after the one of this step.
            new: In new processes, if the ranks have processes of their own.
        """

    def start(self, sides: Sequence[Side]) -> None:
        """Start what these runs need, without waiting for it; by default nothing."""
        return


class NoVerdict(RankFailure):
    """One of the runs to compare did not finish."""

    exit_code: ClassVar[int] = 3

    @classmethod
    def of(cls, side: Side, reason: str) -> NoVerdict:
        """Return the error for a run that failed."""
        return cls(f"no verdict, because this run failed: {side.name}", [reason])


class LaunchedRanks(Ranks):
    """Ranks of this machine, started for each run like those of training.

    Raises:
        RankFailure: A user error on a rank.
        NoVerdict: A rank failed for another reason.
    """

    def __call__(self, side: Side, fault: Fault = None) -> list[Record]:
        from ascend_run.tools.verify.capture.record import read_records

        with temporary_folder() as folder:
            self._launch(job_of(side, fault, folder=str(folder)))
            return read_records(folder, side.world_size)

    def train(
        self, side: Side, until: int, fault: Fault = None, *, new: bool = False
    ) -> list[TrainingRecord]:
        from ascend_run.tools.verify.capture.training_record import read_training_records

        with temporary_folder() as folder:
            self._launch(job_of(side, fault, folder=str(folder), until=until))
            return read_training_records(folder, side.world_size)

    def _launch(self, job: Job) -> None:
        from ascend_run.launch.agent import launch_ranks
        from ascend_run.launch.options import LaunchOptions

        side, request = job.side, job.as_request()
        with environment_of(side.prepare(), side.world_size):
            try:
                launch_ranks(_TARGET, request, LaunchOptions(nproc=side.world_size))
            except RankFailure as error:
                if error.exit_code == AscendRunError.exit_code:  # a user error
                    raise
                raise NoVerdict.of(side, str(error)) from None


class PoolRanks(Ranks):
    """The ranks of a pool, which are used for all runs.

    Args:
        timeout: Limit for one run. Unit: seconds.

    Raises:
        PoolError: A rank failed.
    """

    def __init__(self, pool: GlooPool, timeout: float = 100.0) -> None:
        self.pool, self.timeout = pool, timeout

    def __call__(self, side: Side, fault: Fault = None) -> list[Record]:
        return self._run(job_of(side, fault))

    def train(
        self, side: Side, until: int, fault: Fault = None, *, new: bool = False
    ) -> list[TrainingRecord]:
        return self._run(job_of(side, fault, until=until))

    def _run(self, job: Job) -> list[Any]:
        size, request = job.side.world_size, job.as_request()
        return self.pool.run(rank_jobs.in_pool, size, request, timeout=self.timeout)


def job_of(side: Side, fault: Fault, *, folder: str = "", until: int | None = None) -> Job:
    """Return the job of a run's ranks, with the fault by its name."""
    if callable(fault):
        fault = f"{fault.__module__}:{fault.__qualname__}"
    return Job(side=side, fault=fault, folder=folder, until=until)


@contextmanager
def environment_of(prepared: PreparedRun, nproc: int) -> Iterator[Mapping[str, str]]:
    """Set the environment variables of a run's ranks, yield those that were set, and restore them.

    Raises:
        ConfigError: A plugin needs another value than the user has set.
    """
    from ascend_run.prepare.rank_start import set_environment

    before = dict(os.environ)
    try:
        set_environment(prepared, nproc)
        yield {name: v for name, v in os.environ.items() if before.get(name) != v}
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A private folder, removed on exit."""
    folder = Path(tempfile.mkdtemp(prefix="ascend-run-verify-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
