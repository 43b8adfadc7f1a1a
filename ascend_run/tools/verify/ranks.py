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

if TYPE_CHECKING:
    from ascend_run.prepare.prepare import PreparedRun
    from ascend_run.testing.pool import GlooPool
    from ascend_run.tools.verify.capture.record import Record

_TARGET: Final = f"{rank_jobs.__name__}:{rank_jobs.probe_to_files.__name__}"

Fault = str | Callable[[], Any] | None


class Ranks(Protocol):
    """Executes the probes of a run and returns its records, by rank."""

    @abstractmethod
    def __call__(self, side: Side, fault: Fault = None) -> list[Record]:
        """
        Args:
            fault: Fault to plant in the run; see the package's docstring.
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
    """Ranks of this machine, started for each run like those of training."""

    def __call__(self, side: Side, fault: Fault = None) -> list[Record]:
        """
        Raises:
            RankFailure: A user error on a rank.
            NoVerdict: A rank failed for another reason.
        """
        from ascend_run.launch.agent import launch_ranks
        from ascend_run.launch.options import LaunchOptions
        from ascend_run.tools.verify.capture.record import read_records

        with environment_of(side.prepare(), side.world_size), temporary_folder() as folder:
            request = request_of(side, fault, folder=str(folder))
            try:
                launch_ranks(_TARGET, request, LaunchOptions(nproc=side.world_size))
            except RankFailure as error:
                if error.exit_code == AscendRunError.exit_code:  # a user error
                    raise
                raise NoVerdict.of(side, str(error)) from None
            return read_records(folder, side.world_size)


class PoolRanks(Ranks):
    """The ranks of a pool.

    Args:
        timeout: Limit for one run. Unit: seconds.
    """

    def __init__(self, pool: GlooPool, timeout: float = 100.0) -> None:
        self.pool, self.timeout = pool, timeout

    def __call__(self, side: Side, fault: Fault = None) -> list[Record]:
        """
        Raises:
            PoolError: A rank failed.
        """
        request = request_of(side, fault)
        found: list[Record] = self.pool.run(
            rank_jobs.probe_in_pool, side.world_size, request, timeout=self.timeout
        )
        return found


def request_of(side: Side, fault: Fault, **more: object) -> Mapping[str, object]:
    """Return the request to the ranks of a run, as JSON values."""
    if callable(fault):
        fault = f"{fault.__module__}:{fault.__qualname__}"
    return {"side": side.as_request(), "fault": fault, **more}


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
