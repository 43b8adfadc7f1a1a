"""One rank of the pool: takes jobs from a pipe until the pipe closes.

Started by ``pool``, which hands it one end of the pipe as an open file. What it prints goes to its
own log; results and errors go back through the pipe.
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
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import attrs

_MANY_THREADS = 40
"""Each group has three, one of which wakes up a hundred times a second, and a model's reference
cycles keep the groups of jobs that are over until they are collected."""


@attrs.frozen(kw_only=True)
class Job:
    """One call of one function on one rank."""

    module: str
    file: str | None
    """Where the module's source is, for modules that cannot be found by name."""
    qualname: str
    arguments: bytes
    """Pickled ``(args, kwargs)``: unpickled only after the module is imported."""
    search_path: tuple[str, ...]
    """The caller's ``sys.path``."""
    rank: int
    world_size: int
    store: str
    """File through which the ranks of this job meet."""
    timeout: float
    """Unit: seconds; then the worker prints where it stands and exits."""


@attrs.frozen(kw_only=True)
class Failure:
    """An exception that a job raised."""

    kind: str
    """Name of the exception's class."""
    message: str
    traceback: str
    at: float
    """The machine's monotonic clock when it was raised: what came first is the cause. Unit:
    seconds."""

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """The exception under way."""
        return cls(
            kind=type(error).__name__,
            message=str(error),
            traceback=traceback.format_exc(),
            at=time.monotonic(),
        )


def load_function(job: Job) -> Callable[..., Any]:
    """The job's function, imported under the caller's search path."""
    sys.path[:] = job.search_path
    try:
        module = importlib.import_module(job.module)
    except ModuleNotFoundError as error:
        if job.file is None or (error.name and not job.module.startswith(error.name)):
            raise
        # A test module that pytest imported by its path, under a name that no search path knows.
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
    """The function's answer, with a default process group of the job's size around the call; a
    Failure where it raised."""
    import torch
    from torch import distributed

    function = load_function(job)
    args, kwargs = pickle.loads(job.arguments)
    # A job must not see what an earlier one left behind.
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
    # A rank that is done with a short job must not leave while another still connects to it.
    distributed.barrier()
    try:
        return function(*args, **kwargs)
    except Exception as error:
        # Before the group is torn down, which makes the ranks that wait for this one fail too.
        return Failure.of(error)
    finally:
        if distributed.is_initialized():  # the job may have torn everything down itself
            distributed.destroy_process_group()
        torch.set_default_dtype(default_dtype)
        os.environ.clear()
        os.environ.update(environment)


def answer(job: Job) -> bytes:
    """The pickled result or Failure of one job."""
    try:
        result = run_job(job)
        reply = pickle.dumps(result)
    except Exception as error:  # it could not be found, joined or sent
        result = Failure.of(error)
        reply = pickle.dumps(result)
    # Frames of an exception may have held process groups open: peers that wait in a collective see
    # the connection close and fail at once.
    if isinstance(result, Failure) or _num_threads() > _MANY_THREADS:
        gc.collect()
        if not gc.get_freeze_count():
            gc.freeze()  # Torch and Megatron stay: looking through them takes most of a collection.
    return reply


def _num_threads() -> int:
    import psutil

    return int(psutil.Process().num_threads())


def serve(descriptor: int) -> None:
    """Answer the jobs that come through an open pipe, until the pool closes its end."""
    import torch

    connection = Connection(descriptor)
    torch.set_num_threads(1)
    connection.send_bytes(b"ready")
    while True:
        try:
            job: Job = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        # The watchdog also ends a rank whose pool is gone.
        faulthandler.dump_traceback_later(job.timeout, exit=True)
        reply = answer(job)
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()
        connection.send_bytes(reply)
