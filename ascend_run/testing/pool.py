"""Gloo ranks that live for the whole test session.

Importing torch and Megatron costs seconds; a job on running ranks costs milliseconds, and so do new
ranks, which are forks of a process that has imported them.
"""

from __future__ import annotations

import inspect
import os
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import attrs

from ascend_run.core.rank.failures import Failure as RankReport
from ascend_run.launch.failures import silent_failure

from .rank_processes import ForkServers, RankProcess, fork_servers, state_of_caller
from .worker import Failure, Job

START_SECONDS: Final = 180.0
"""Limit for the start of a job's processes, or the job's own limit if that is longer: importing
torch on a loaded machine is slow."""
GRACE_SECONDS: Final = 10.0
"""Time for the other ranks to notice that one has failed."""
LOG_TAIL_BYTES: Final = 4000
_STACKS_BYTES: Final = 2**16
_HANG: Final = "Timeout ("
"""Heading of the stacks that a rank's watchdog (faulthandler) prints."""
_STACKS_SECONDS: Final = 0.5
"""Time for the watchdogs of the other ranks, which were started at the same time."""


class PoolError(Exception):
    """A job failed on a rank.

    Args:
        rank: The rank that failed first.
        kind: Class name of its exception; ``Start``, ``Hang`` or ``Death`` where there was none.
        message: Its message.
        details: The remote traceback, or the end of the rank's log.
        reports: The exceptions of all ranks that raised one; empty where there was none.
    """

    def __init__(
        self,
        rank: int,
        kind: str,
        message: str,
        details: str,
        reports: Sequence[RankReport] = (),
    ) -> None:
        self.rank, self.kind, self.message, self.details = rank, kind, message, details
        self.reports = tuple(reports)
        super().__init__(f"rank {rank}: {kind}: {message}\n{details}")


@attrs.frozen
class _Worker:
    process: RankProcess
    connection: Connection
    log: Path

    def log_tail(self) -> str:
        """Return the end of the log; of a rank that hung, its stacks, innermost calls first; of one
        that could not be started, what its server has printed."""
        with self.log.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - _STACKS_BYTES))
            text = stream.read().decode(errors="replace") or self.process.server_log()
        _, heading, stacks = text.rpartition(_HANG)
        return (heading + stacks)[:LOG_TAIL_BYTES] if heading else text[-LOG_TAIL_BYTES:]


class GlooPool:
    """Runs module-level functions on 1 to n ranks; all world sizes share the same processes.

    Processes are started when a job needs them. A job that fails, dies or hangs ends all of them,
    and the next one starts new ones: after a failure while a process group was being created, torch
    cannot create another one in the same process.

    Args:
        preload: Module that every process imports when it starts.
        limit_factor: Multiplies the limit of every job, for a machine that does other work too.
        servers: Processes to fork the ranks from; default: those of the pytest session, else own
            ones, which live until the pool is closed.
    """

    def __init__(
        self,
        preload: str = "",
        *,
        limit_factor: float = 1.0,
        servers: ForkServers | None = None,
    ) -> None:
        self._preload = preload
        self._limit_factor = limit_factor
        self._given, self._servers = servers, servers
        self._closing = ExitStack()
        self._workers: list[_Worker] = []
        self._num_ready = self._num_restarts = 0
        self._folder: Path | None = None
        self._jobs = 0

    def __enter__(self) -> GlooPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout: float = 60.0,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``function(*args, **kwargs)`` on every rank of a fresh default process group.

        Args:
            function: Importable by name, so neither a lambda nor a closure.
            timeout: Limit for the job, without the start of processes, which has a limit of its
                own: 180 seconds, or this one if it is longer. Unit: seconds.

        Returns:
            The return value of each rank, which must be picklable.

        Raises:
            PoolError: The first failure, with the rank and its traceback.
        """
        if function.__module__ == "__main__" or "<" in function.__qualname__:
            raise ValueError(f"{function.__qualname__} cannot be imported by another process")
        timeout *= self._limit_factor
        self._ensure(world_size, max(START_SECONDS, timeout))
        self._jobs += 1
        job = Job(
            module=function.__module__,
            file=inspect.getsourcefile(function),
            qualname=function.__qualname__,
            arguments=pickle.dumps((args, kwargs)),
            search_path=tuple(sys.path),
            rank=0,
            world_size=world_size,
            store=str(self._scratch() / f"store-{self._jobs}"),
            timeout=timeout,
        )
        team = self._workers[:world_size]
        for rank, worker in enumerate(team):
            worker.connection.send_bytes(pickle.dumps(attrs.evolve(job, rank=rank)))
        try:
            return self._collect(team, timeout)
        except BaseException:
            # After an interrupt, such as a test's time limit, the next job would receive the
            # replies of this one.
            self._end_ranks()
            raise

    def start(self, count: int) -> None:
        """Start the missing processes without waiting until they are ready."""
        self._workers.extend([self._spawn(rank) for rank in range(len(self._workers), count)])

    def close(self) -> None:
        """End all processes and remove their files; the pool can be used again."""
        self._end_ranks()
        self._closing.close()
        self._servers = self._given

    def _end_ranks(self) -> None:
        for rank, worker in enumerate(self._workers):
            worker.connection.close()
            worker.process.kill(wait=rank < self._num_ready)
        self._num_restarts += bool(self._workers)
        self._workers.clear()
        self._num_ready = 0
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _collect(self, team: list[_Worker], timeout: float) -> list[object]:
        deadline = time.monotonic() + timeout + GRACE_SECONDS
        waiting = {worker.connection: rank for rank, worker in enumerate(team)}
        results: list[object] = [None] * len(team)
        failures: dict[int, Failure] = {}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                self._end_ranks()
                hung = sorted(waiting.values())
                raise _first_of(failures) or PoolError(
                    hung[0], "Hang", f"no reply from ranks {hung}", ""
                )
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    reply = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    # The other ranks would only report a lost connection.
                    death = self._death(rank, team, timeout)
                    self._end_ranks()
                    raise death from None
                if isinstance(reply, Failure):
                    failures[rank] = reply
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                else:
                    results[rank] = reply
        if failed := _first_of(failures):
            self._end_ranks()
            raise failed
        return results

    def _death(self, rank: int, team: list[_Worker], timeout: float) -> PoolError:
        code = team[rank].process.exit_code(GRACE_SECONDS)
        log = team[rank].log_tail()
        if _HANG not in log:
            how = silent_failure(rank, code, time.time()).summary
            return PoolError(rank, "Death", f"the process {how}", log)
        time.sleep(_STACKS_SECONDS)
        # Which rank hangs, and which ones only wait for it, shows in their stacks.
        tails = {other: worker.log_tail() for other, worker in enumerate(team) if other != rank}
        others = [f"rank {other}: {tail}" for other, tail in tails.items() if _HANG in tail]
        message = f"still running after {timeout:g} s"
        return PoolError(rank, "Hang", message, "\n".join([log, *others]))

    def _ensure(self, count: int, seconds: float) -> None:
        """Start the missing processes concurrently, and wait until all of them are ready."""
        self.start(count)
        deadline = time.monotonic() + seconds
        for rank in range(self._num_ready, count):
            remaining = max(0.0, deadline - time.monotonic())
            if failed := _start_failure(rank, self._workers[rank], remaining, seconds):
                self._end_ranks()
                raise failed
            self._num_ready += 1

    def _spawn(self, rank: int) -> _Worker:
        if self._servers is None:
            self._servers = self._closing.enter_context(fork_servers())
        log = self._scratch() / f"rank-{rank}.log"
        start, seed = state_of_caller(self._preload), rank + self._num_restarts
        with log.open("wb") as stream:
            process, connection = self._servers.start(start, stream, seed)
        return _Worker(process, connection, log)

    def _scratch(self) -> Path:
        """Folder of the logs and the rendezvous files."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="ascend-run-pool-"))
        return self._folder


def _first_of(failures: Mapping[int, Failure]) -> PoolError | None:
    """Return the error of the rank that failed first."""
    if not failures:
        return None
    rank, first = min(failures.items(), key=lambda item: item[1].at)
    reports = [failure.report for failure in failures.values()]
    return PoolError(rank, first.kind, first.message, first.traceback, reports)


def _start_failure(rank: int, worker: _Worker, remaining: float, limit: float) -> PoolError | None:
    """Wait until a process is ready; return the error if it is not."""
    try:
        if worker.connection.poll(remaining):
            assert worker.connection.recv_bytes() == b"ready"
            return None
    except (EOFError, ConnectionResetError):
        code = worker.process.exit_code(GRACE_SECONDS)
        how = silent_failure(rank, code, time.time()).summary
        return PoolError(rank, "Death", f"the process {how} while it started", worker.log_tail())
    message = (
        f"the process was not ready {limit:g} s after its start; run less beside it, or raise the "
        "timeout"
    )
    return PoolError(rank, "Start", message, worker.log_tail())
