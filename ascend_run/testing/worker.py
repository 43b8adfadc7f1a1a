"""One rank of the pool: runs jobs from a pipe until the pipe is closed.

Started by ``fork_server`` with one end of the pipe. Output goes to the rank's log; results and
errors are sent through the pipe.
"""

from __future__ import annotations

import datetime
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import attrs

from ascend_run.core.rank.failures import Failure as RankReport
from ascend_run.core.rank.failures import describe_failure

from .compiling_in_turn import compile_in_turn

_MANY_THREADS = 40
"""Threads of process groups after which the garbage of finished jobs is collected. Each group has
three, one of which polls a hundred times per second, and a model's reference cycles keep its groups
alive."""


@attrs.frozen(kw_only=True)
class Start:
    """What a rank takes over from the process of its pool, as it is when the rank is started."""

    environment: Mapping[str, str]
    search_path: tuple[str, ...]
    """The caller's ``sys.path``."""
    folder: str
    """Working directory."""
    preload: str
    """Module to import before the rank is ready; empty: none."""

    def apply(self) -> None:
        """Set them in this process."""
        os.environ.clear()
        os.environ.update(self.environment)
        sys.path[:] = self.search_path
        os.chdir(self.folder)


@attrs.frozen(kw_only=True)
class Job:
    """One call of one function on one rank."""

    module: str
    file: str | None
    """Source file of the module, for modules that cannot be imported by name."""
    qualname: str
    arguments: bytes
    """Pickled ``(args, kwargs)``: unpickled only after the module is imported."""
    search_path: tuple[str, ...]
    """The caller's ``sys.path``."""
    rank: int
    world_size: int
    store: str
    """Rendezvous file of this job."""
    timeout: float
    """After this time the worker prints its stacks and exits. Unit: seconds."""


@attrs.frozen(kw_only=True)
class Failure:
    """An exception that a job raised."""

    kind: str
    """Name of the exception's class."""
    message: str
    traceback: str
    at: float
    """Monotonic time when it was raised; the first failure is the cause. Unit: seconds."""
    report: RankReport
    """The same as a rank of training would report it."""

    @classmethod
    def of(cls, error: Exception, rank: int) -> Failure:
        """Build a Failure from the exception that is being handled."""
        return cls(
            kind=type(error).__name__,
            message=str(error),
            traceback=traceback.format_exc(),
            at=time.monotonic(),
            report=describe_failure(error, rank=rank, phase="run"),
        )


def load_function(job: Job) -> Callable[..., Any]:
    """Import the job's function with the caller's ``sys.path``."""
    sys.path[:] = job.search_path
    try:
        module = importlib.import_module(job.module)
    except ModuleNotFoundError as error:
        if job.file is None or (error.name and not job.module.startswith(error.name)):
            raise
        # A test module that pytest imported by path, under a name that is not on sys.path.
        spec = importlib.util.spec_from_file_location(job.module, job.file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[job.module] = module
        spec.loader.exec_module(module)
    found: Any = module
    for part in job.qualname.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def run_job(job: Job) -> Any:
    """Call the function inside a default process group of the job's size; return its result, or a
    Failure if it raised."""
    import torch
    from torch import distributed

    function = load_function(job)
    args, kwargs = pickle.loads(job.arguments)
    # Reset state that an earlier job may have changed.
    torch.manual_seed(0)
    random.seed(0)
    default_dtype, environment = torch.get_default_dtype(), dict(os.environ)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{job.store}",
        rank=job.rank,
        world_size=job.world_size,
        timeout=datetime.timedelta(seconds=job.timeout),
    )
    # A rank must not finish a short job while another rank is still connecting to it, here or in a
    # group that the job has created.
    distributed.barrier()
    try:
        result = function(*args, **kwargs)
        if distributed.is_initialized():
            # The watchdog of a rank that still runs the job must be the first, for it to be named.
            _start_watchdog(2 * job.timeout)
            distributed.barrier()
        return result
    except Exception as error:
        # Recorded before the group is destroyed, which makes the waiting ranks fail too.
        return Failure.of(error, job.rank)
    finally:
        if distributed.is_initialized():  # the job may have torn everything down itself
            distributed.destroy_process_group()
        torch.set_default_dtype(default_dtype)
        os.environ.clear()
        os.environ.update(environment)


class Garbage:
    """The garbage of finished jobs.

    What outlives a job, such as modules and what torch.compile has compiled, is not searched again
    in later collections, which would otherwise take up to a second each, also those of a job.
    """

    def __init__(self) -> None:
        self._lasting_threads: int | None = None
        """Threads after the last collection: those of compilers and libraries last."""

    def collect(self, *, failed: bool) -> None:
        """Call after each job.

        Args:
            failed: The frames of an exception may hold process groups. Collecting them closes their
                connections, so that peers that wait in a collective fail at once.
        """
        lasting = self._lasting_threads
        if lasting is not None and not failed and _num_threads() <= lasting + _MANY_THREADS:
            return
        gc.collect()
        if lasting is not None and _num_threads() > lasting + _MANY_THREADS:
            gc.unfreeze()  # what was alive in an earlier collection may be garbage now
            gc.collect()
        gc.freeze()
        self._lasting_threads = _num_threads()


def reply_to(job: Job, garbage: Garbage) -> bytes:
    """Run a job and return its pickled result or Failure."""
    try:
        result = run_job(job)
        reply = pickle.dumps(result)
    except Exception as error:  # it could not be imported, or its result not be pickled
        result = Failure.of(error, job.rank)
        reply = pickle.dumps(result)
    garbage.collect(failed=isinstance(result, Failure))
    return reply


def _start_watchdog(seconds: float) -> None:
    """Print all stacks and exit after this time, also where the pool has died. Replaces the one
    that was started before."""
    faulthandler.dump_traceback_later(seconds, exit=True)


def _num_threads() -> int:
    import psutil

    return int(psutil.Process().num_threads())


def serve(descriptor: int) -> None:
    """Run the jobs that are received through an open pipe, until the pool closes its end. The first
    message is a Start."""
    connection = Connection(descriptor)
    try:
        start: Start = pickle.loads(connection.recv_bytes())
    except EOFError:  # the pool has been closed in the meantime
        return
    start.apply()
    _import(start.preload)
    compile_in_turn()
    connection.send_bytes(b"ready")
    garbage = Garbage()
    while True:
        try:
            job: Job = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        _start_watchdog(job.timeout)
        reply = reply_to(job, garbage)
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()
        connection.send_bytes(reply)


def _import(preload: str) -> None:
    import torch

    torch.set_num_threads(1)
    if preload:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron's, about each missing optional library
            importlib.import_module(preload)
