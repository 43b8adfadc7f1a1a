"""Ranks on this machine under torchrun's elastic agent, used as a library. Imports torch."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import torch.distributed.elastic.rendezvous.registry as rendezvous
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from ascend_run.plugin_api.errors import RankFailure

from .failures import Failure, first_failure, opening, read_failure, silent_failure, summarize
from .options import LaunchOptions
from .rank import ATTEMPT_VARIABLE, LAUNCHER_VARIABLE, REQUEST_VARIABLE, TARGET_VARIABLE

_ROLE: Final = "rank"
_POLL_SECONDS: Final = 0.05
_SETTLE_SECONDS: Final = 3.0
"""How long the first failure may take to show where so far only its consequences do."""
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


OnFailure = Callable[[str, bool], None]
"""Told of a failed attempt: why, in a line, and whether that is only that other ranks are gone."""


def launch_ranks(
    target: str,
    request: Mapping[str, Any],
    options: LaunchOptions,
    on_failure: OnFailure = lambda why, lost_peer: None,
) -> bool:
    """Start this machine's ranks and wait for their end.

    Args:
        target: ``module:function``, called on every rank with the request.
        request: What JSON can hold.
        on_failure: Called after every attempt that failed, where the failure or rank 0 is on this
            machine.

    Returns:
        Whether rank 0 ran on this machine.

    Raises:
        RankFailure: A rank failed; all are ended.
        KeyboardInterrupt: SIGINT came; all are ended. Other signals raise SystemExit.
    """
    os.environ[TARGET_VARIABLE] = target
    os.environ[REQUEST_VARIABLE] = json.dumps(request)
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    with _quiet_elastic_log(), _own_signal_handlers(), _temporary_folder() as folder:
        agent = _RankAgent(
            spec=_worker_spec(options),
            logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
            grace_seconds=options.grace_seconds,
            on_failure=on_failure,
        )
        try:
            result = agent.run(_ROLE)
        except SignalException as error:
            agent.end_ranks()
            if agent.hosts_first_rank:
                on_failure(f"ended by {signal.Signals(error.sigval).name}", False)
            if error.sigval is signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + error.sigval) from None
        except RendezvousError as error:
            where = options.rdzv_endpoint or "this machine"
            raise RankFailure(f"the nodes could not meet at {where}: {error}") from None
        finally:
            agent.end_ranks()
        if result is None:
            raise RankFailure("the other nodes have ended the run")
        if result.is_failed():
            raise agent.tell_failures()
        return agent.hosts_first_rank


class _RankAgent(LocalElasticAgent):
    """Keeps what torch's agent forgets: which ranks failed by themselves, and when.

    Once a rank has failed, the others are sent SIGTERM and after the grace time SIGKILL, with
    every process that they started.
    """

    def __init__(self, *, grace_seconds: int, on_failure: OnFailure, **arguments: Any) -> None:
        super().__init__(start_method="spawn", shutdown_timeout=grace_seconds, **arguments)
        self._on_failure = on_failure
        self.failures: list[Failure] = []
        self._grace_seconds = grace_seconds
        self._seen: dict[int, Failure] = {}

    @property
    def hosts_first_rank(self) -> bool:
        """Whether rank 0 is, or was, one of this machine's; known once the nodes have met."""
        return any(worker.global_rank == 0 for worker in self._worker_group.workers)

    def tell_failures(self) -> RankFailure:
        """Tell of the attempt that failed; the error that sums it up."""
        first = first_failure(self.failures)
        if self.hosts_first_rank or not first.lost_peer:
            self._on_failure(opening(first, first.summary), first.lost_peer)
        return summarize(self.failures)

    def end_ranks(self) -> None:
        """End every rank and whatever it started; no signal interrupts this."""
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        self._end()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._seen = {}
        self.failures = []
        os.environ[ATTEMPT_VARIABLE] = str(self._attempt(worker_group))
        return super()._start_workers(worker_group)

    def _attempt(self, worker_group: WorkerGroup) -> int:
        """The round in which the nodes have met; a static rendezvous has none."""
        holder = getattr(worker_group.spec.rdzv_handler, "_state_holder", None)
        if holder is not None:
            return int(holder.state.round)
        return int(worker_group.spec.max_restarts - self._remaining_restarts)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        done = worker_group.spec.max_restarts - self._remaining_restarts
        total = worker_group.spec.max_restarts
        print(
            f"{self.tell_failures()}\nstarting all ranks again ({done} of {total})",
            file=sys.stderr,
            flush=True,
        )
        super()._restart_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        ended = self._look(worker_group)
        if not self._seen and not ended:
            return RunResult(state=WorkerState.HEALTHY)
        if self._seen:
            if not self._is_settled():
                return RunResult(state=WorkerState.HEALTHY)
            self._end()
            self._look_for_reports(worker_group)
            self.failures = list(self._seen.values())
        return super()._monitor_workers(worker_group)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Whatever signal ends the run, ranks are ended in one way."""
        self._end()

    def _look(self, worker_group: WorkerGroup) -> bool:
        """Note ranks that have failed, ended or not; whether every rank has ended."""
        exit_codes = {local: process.poll() for local, process in self._processes().items()}
        self._look_for_reports(worker_group)  # after the ends: a rank reports, then ends
        for local_rank, exit_code in exit_codes.items():
            if exit_code:
                rank = worker_group.workers[local_rank].global_rank
                failure = silent_failure(rank, exit_code, time.time())
                self._seen.setdefault(local_rank, failure)
        return None not in exit_codes.values()

    def _look_for_reports(self, worker_group: WorkerGroup) -> None:
        for local_rank in range(len(worker_group.workers)):
            if report := read_failure(self._pcontext.error_files[local_rank]):
                self._seen[local_rank] = report

    def _is_settled(self) -> bool:
        """Whether the rank that failed first is known to have, and has ended."""
        processes = self._processes()
        causes = [local for local, failure in self._seen.items() if not failure.lost_peer]
        if any(processes[local].poll() is not None for local in causes):
            return True
        first = min(failure.time for failure in self._seen.values())
        return time.time() - first > _SETTLE_SECONDS

    def _processes(self) -> dict[int, Any]:
        """Local rank -> its Popen."""
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return {local_rank: handler.proc for local_rank, handler in handlers.items()}

    def _end(self) -> None:
        if self._pcontext is None:
            return
        self._pcontext.close(signal.SIGTERM, self._grace_seconds)
        for process in self._processes().values():
            with suppress(ProcessLookupError):  # each rank leads a session of its own
                os.killpg(process.pid, signal.SIGKILL)


def _worker_spec(options: LaunchOptions) -> WorkerSpec:
    seconds = options.join_seconds
    parameters: dict[str, Any] = {"timeout": seconds, "join_timeout": seconds}
    master_addr: str | None = None
    master_port: int | None = None
    if options.nnodes == 1:
        backend, endpoint, local_addr = "c10d", "localhost:0", "localhost"
    else:
        backend, endpoint, local_addr = "c10d", options.rdzv_endpoint or "", None
        if options.node_rank is not None:
            backend, parameters["rank"] = "static", options.node_rank
            master_addr, master_port = parse_rendezvous_endpoint(endpoint, default_port=-1)
    handler = rendezvous.get_rendezvous_handler(
        RendezvousParameters(
            backend=backend,
            endpoint=endpoint,
            run_id=uuid.uuid4().hex if options.nnodes == 1 else "ascend-run",
            min_nodes=options.nnodes,
            max_nodes=options.nnodes,
            local_addr=local_addr,
            **parameters,
        )
    )
    return WorkerSpec(
        role=_ROLE,
        local_world_size=options.nproc,
        entrypoint=sys.executable,
        # -P: what lies in the current folder is not imported in place of a library.
        args=("-P", "-m", "ascend_run.core.launch.rank"),
        rdzv_handler=handler,
        max_restarts=options.max_restarts,
        monitor_interval=_POLL_SECONDS,
        master_addr=master_addr,
        master_port=master_port,
        local_addr=local_addr,
    )


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """The agent sets handlers of its own; put back what was there."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _quiet_elastic_log() -> Iterator[None]:
    """What torch's agent logs of failures is in our own message, shorter."""
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
