"""Ranks that are started once and shared by the runs to compare."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Final

import attrs

from ascend_run.launch.failures import summarize
from ascend_run.plugin_api.errors import AscendRunError
from ascend_run.testing.pool import GlooPool, PoolError
from ascend_run.testing.rank_processes import fork_servers
from ascend_run.types.config import DEFAULT_PLATFORM

from . import rank_jobs
from .questions import Side
from .rank_jobs import Job
from .ranks import (
    Fault,
    LaunchedRanks,
    NoVerdict,
    Ranks,
    environment_of,
    job_of,
    temporary_folder,
)

if TYPE_CHECKING:
    from ascend_run.tools.verify.capture.record import Record
    from ascend_run.tools.verify.capture.training_record import TrainingRecord

_THREADS: Final = "OMP_NUM_THREADS"
"""Depends on the number of ranks; a rank sets its number of threads for each run."""
_ADVICE: Final = {
    "Hang": "; if it is only slow, give it more with --timeout",
    "Start": " with --timeout",
}
"""Kind of a rank's failure -> what its message advises."""
_COMPARISON: Final = "ascend_run.tools.verify.compare.comparison"


@attrs.define
class _Team:
    """Running ranks, and what they have imported."""

    pool: GlooPool
    plugins: frozenset[str] = frozenset()
    """Plugins of the runs that they have executed."""


class SharedRanks(Ranks):
    """Ranks of this machine, started once for all runs whose environment is equal.

    Starting takes much longer than most of the runs. Ranks that have run with a plugin are not used
    for a run without it: what the plugin has left in the process would then be in both of the runs
    that are compared. So references come first, and ranks are rarely started again. Runs that only
    show whether a plugin acts come next, on any ranks: several plugins are left out in turn.

    The ranks of other platforms than the CPU are started for each run. The pool's default group is
    gloo's, and a device keeps more of an earlier run than a process of the CPU: memory of its
    allocator, compiled kernels, communicators.

    Args:
        timeout: Limit for one run, and for the start of its ranks if it exceeds the pool's.
            Unit: seconds.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._teams: dict[frozenset[tuple[str, str]], _Team] = {}
        self._closing = ExitStack()
        self._servers = self._closing.enter_context(fork_servers())
        self._launched = LaunchedRanks()

    def __enter__(self) -> SharedRanks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for team in self._teams.values():
            team.pool.close()
        self._teams.clear()
        self._closing.close()

    def start(self, sides: Sequence[Side]) -> None:
        """Start the ranks of these runs; meanwhile import what compares the runs."""
        for side in sorted(sides, key=lambda side: side.world_size, reverse=True):
            if _can_share(side):
                with environment_of(side.prepare(), side.world_size) as variables:
                    if (key := _key(variables)) not in self._teams:
                        self._teams[key] = self._team()
                        self._teams[key].pool.start(side.world_size)
        importlib.import_module(_COMPARISON)

    def __call__(self, side: Side, fault: Fault = None) -> list[Record]:
        """
        Raises:
            RankFailure: A user error on a rank.
            NoVerdict: A rank failed for another reason, died, or exceeded the limit.
        """
        from ascend_run.tools.verify.capture.record import read_records

        if not _can_share(side):
            return self._launched(side, fault)
        with temporary_folder() as folder:
            self._run(job_of(side, fault, folder=str(folder)))
            return read_records(folder, side.world_size)

    def train(
        self, side: Side, until: int, fault: Fault = None, *, new: bool = False
    ) -> list[TrainingRecord]:
        """
        Raises:
            RankFailure, NoVerdict: As above.
        """
        from ascend_run.tools.verify.capture.training_record import read_training_records

        if not _can_share(side):
            return self._launched.train(side, until, fault)
        with temporary_folder() as folder:
            self._run(job_of(side, fault, folder=str(folder), until=until), new=new)
            return read_training_records(folder, side.world_size)

    def _run(self, job: Job, *, new: bool = False) -> None:
        side = job.side
        with environment_of(side.prepare(), side.world_size) as variables:
            threads = int(os.environ.get(_THREADS) or len(os.sched_getaffinity(0)))
            pool = self._pool_of(side, variables)
            if new:
                pool.close()
            try:
                pool.run(
                    rank_jobs.to_files_in_pool,
                    side.world_size,
                    attrs.evolve(job, num_threads=threads).as_request(),
                    timeout=self._timeout,
                )
            except PoolError as error:
                raise _failure(side, error) from None

    def _pool_of(self, side: Side, variables: Mapping[str, str]) -> GlooPool:
        enabled = frozenset(side.enable)
        team = self._teams.setdefault(_key(variables), self._team())
        if not team.plugins <= enabled and not side.only_steps:
            team.pool.close()
            team.plugins = frozenset()
        team.plugins |= enabled
        return team.pool

    def _team(self) -> _Team:
        """Return a new team, whose ranks are started when they are needed."""
        return _Team(GlooPool(rank_jobs.PRELOAD, servers=self._servers))


def _can_share(side: Side) -> bool:
    return side.prepare().config.platform == DEFAULT_PLATFORM


def _key(variables: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset((name, value) for name, value in variables.items() if name != _THREADS)


def _failure(side: Side, error: PoolError) -> AscendRunError:
    """Return the error of a failed run: a user error on a rank as it is, else no verdict."""
    if not error.reports:
        text = f"rank {error.rank}: {error.message}{_ADVICE.get(error.kind, '')}"
        return NoVerdict.of(side, "\n".join(filter(None, (text, error.details.rstrip()))))
    failure = summarize(error.reports)
    if failure.exit_code == AscendRunError.exit_code:
        return failure
    return NoVerdict.of(side, str(failure))
