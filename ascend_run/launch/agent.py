"""Start this machine's ranks with torchrun's elastic agent, used as a library. Imports torch."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousError

from ascend_run.core.rank.failures import Failure, read_failure
from ascend_run.core.rank.rank_environment import ATTEMPT_VARIABLE, RUN_ID_VARIABLE
from ascend_run.plugin_api.errors import RankFailure

from .failures import first_failure, opening, silent_failure, summarize
from .options import LaunchOptions
from .rank import LAUNCHER_VARIABLE, REQUEST_VARIABLE, TARGET_VARIABLE
from .rendezvous import rendezvous_of

_ROLE: Final = "rank"
_POLL_SECONDS: Final = 0.05
_SETTLE_SECONDS: Final = 3.0
"""How long to wait for the first failure's report while only its consequences are visible."""
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


OnFailure = Callable[[str, bool], None]
"""Called after a failed attempt: a one-line reason, and whether it was only a lost peer."""


def launch_ranks(
    target: str,
    request: Mapping[str, Any],
    options: LaunchOptions,
    on_failure: OnFailure = lambda why, lost_peer: None,
) -> bool:
    """Start this machine's ranks and wait until they end.

    Args:
        target: ``module:function``, called on every rank with the request.
        request: JSON values.
        on_failure: Called after every failed attempt, if the failure or rank 0 is on this machine.

    Returns:
        Whether rank 0 ran on this machine.

    Raises:
        RankFailure: A rank failed; all ranks have been terminated.
        KeyboardInterrupt: SIGINT was received; all ranks have been terminated. Other signals raise
            SystemExit.
    """
    os.environ[TARGET_VARIABLE] = target
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    with _quiet_elastic_log(), _own_signal_handlers(), _temporary_folder() as folder:
        request_file = folder / "request.json"
        request_file.write_text(json.dumps(request), encoding="utf-8")
        os.environ[REQUEST_VARIABLE] = str(request_file)
        with _as_rank_failure(options):
            agent = _RankAgent(
                spec=_worker_spec(options),
                logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
                grace_seconds=options.grace_seconds,
                on_failure=on_failure,
            )
        try:
            with _as_rank_failure(options):
                result = agent.run(_ROLE)
        except SignalException as error:
            agent.end_ranks()
            if agent.hosts_first_rank:
                on_failure(f"ended by {signal.Signals(error.sigval).name}", False)
            if error.sigval is signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + error.sigval) from None
        finally:
            agent.end_ranks()
        if result is None:
            raise RankFailure("the other nodes have ended the run")
        if result.is_failed():
            raise agent.report_failures()
        return agent.hosts_first_rank


class _RankAgent(LocalElasticAgent):
    """Elastic agent that also records which ranks failed first, and when.

    When a rank fails, the others and all processes they started get SIGTERM and, after the grace
    period, SIGKILL.
    """

    def __init__(self, *, grace_seconds: int, on_failure: OnFailure, **arguments: Any) -> None:
        super().__init__(start_method="spawn", **arguments)
        self._on_failure = on_failure
        self.failures: list[Failure] = []
        self._grace_seconds = grace_seconds
        self._seen: dict[int, Failure] = {}

    @property
    def hosts_first_rank(self) -> bool:
        """Whether rank 0 is on this machine. Known after the rendezvous."""
        return any(worker.global_rank == 0 for worker in self._worker_group.workers)

    def report_failures(self) -> RankFailure:
        """Report the failed attempt to ``on_failure`` and return the error that summarizes it."""
        first = first_failure(self.failures)
        if self.hosts_first_rank or not first.lost_peer:
            self._on_failure(opening(first, first.summary), first.lost_peer)
        return summarize(self.failures)

    def end_ranks(self) -> None:
        """Terminate every rank and the processes it started, with signals ignored."""
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        self._end()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
        self._seen = {}
        self.failures = []
        os.environ[ATTEMPT_VARIABLE] = str(self._attempt(worker_group))
        result: dict[int, object] = super()._start_workers(worker_group)
        return result

    def _attempt(self, worker_group: WorkerGroup) -> int:
        """Return the rendezvous round; a static rendezvous has none, so count restarts."""
        holder = getattr(worker_group.spec.rdzv_handler, "_state_holder", None)
        if holder is not None:
            return int(holder.state.round)
        return int(worker_group.spec.max_restarts - self._remaining_restarts)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        done = worker_group.spec.max_restarts - self._remaining_restarts
        total = worker_group.spec.max_restarts
        print(
            f"{self.report_failures()}\nstarting all ranks again ({done} of {total})",
            file=sys.stderr,
            flush=True,
        )
        super()._restart_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        ended = self._poll(worker_group)
        if not self._seen and not ended:
            return RunResult(state=WorkerState.HEALTHY)
        if self._seen:
            if not self._is_settled():
                return RunResult(state=WorkerState.HEALTHY)
            self._end()
            self._read_reports(worker_group)
            self.failures = list(self._seen.values())
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Terminate the ranks in the same way for every signal."""
        self._end()

    def _poll(self, worker_group: WorkerGroup) -> bool:
        """Record failed ranks, running or not; return whether every rank has ended."""
        exit_codes = {local: process.poll() for local, process in self._processes().items()}
        self._read_reports(worker_group)  # after polling: a rank reports before it ends
        for local_rank, exit_code in exit_codes.items():
            if exit_code:
                rank = worker_group.workers[local_rank].global_rank
                failure = silent_failure(rank, exit_code, time.time())
                self._seen.setdefault(local_rank, failure)
        return None not in exit_codes.values()

    def _read_reports(self, worker_group: WorkerGroup) -> None:
        assert self._pcontext is not None
        for local_rank in range(len(worker_group.workers)):
            if report := read_failure(self._pcontext.error_files[local_rank]):
                self._seen[local_rank] = report

    def _is_settled(self) -> bool:
        """Return whether the rank that failed first is known and has ended."""
        processes = self._processes()
        causes = [local for local, failure in self._seen.items() if not failure.lost_peer]
        if any(processes[local].poll() is not None for local in causes):
            return True
        first = min(failure.time for failure in self._seen.values())
        return time.time() - first > _SETTLE_SECONDS

    def _processes(self) -> dict[int, Any]:
        """Map each local rank to its Popen."""
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return {local_rank: handler.proc for local_rank, handler in handlers.items()}

    def _end(self) -> None:
        if self._pcontext is None:
            return
        self._pcontext.close(signal.SIGTERM, self._grace_seconds)
        for process in self._processes().values():
            with suppress(ProcessLookupError):  # each rank leads its own session
                os.killpg(process.pid, signal.SIGKILL)


def _worker_spec(options: LaunchOptions) -> WorkerSpec:
    handler, address = rendezvous_of(options)
    os.environ[RUN_ID_VARIABLE] = handler.get_run_id()
    # With explicit node ranks, the endpoint also hosts the store.
    host, port = (None, None) if options.node_rank is None else options.endpoint
    return WorkerSpec(
        role=_ROLE,
        local_world_size=options.nproc,
        entrypoint=sys.executable,
        # -P keeps modules in the current folder from shadowing libraries.
        args=("-P", "-m", "ascend_run.launch.rank"),
        rdzv_handler=handler,
        max_restarts=options.max_restarts,
        monitor_interval=_POLL_SECONDS,
        master_addr=host,
        master_port=port,
        local_addr=address,
    )


@contextmanager
def _as_rank_failure(options: LaunchOptions) -> Iterator[None]:
    try:
        yield
    except (RendezvousError, DistStoreError, DistNetworkError) as error:
        where = options.rdzv_endpoint or "this machine"
        reason = str(error).partition("\n")[0]
        raise RankFailure(f"the nodes could not rendezvous at {where}: {reason}") from None


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Restore the signal handlers that the agent replaces."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _quiet_elastic_log() -> Iterator[None]:
    """Silence torch's elastic loggers; our own error message is shorter."""
    loggers = [
        logging.getLogger(name)
        for name in logging.root.manager.loggerDict
        if name.startswith("torch.distributed.elastic")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ascend-run-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
