"""A process that has imported torch and Megatron, and from which ranks are forked.

Started by ``rank_processes``. It does nothing but import, so there is no thread, process group or
device context that a fork would break. Where an import starts a thread, there is an accelerator, or
the system is not Linux, ranks are new interpreters instead: Megatron counts devices when it is
imported, what has asked a driver for them cannot hand them to a fork, and macOS's own libraries do
not work in forks.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import random
import signal
import socket
import struct
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Final

from .runtime import PLATFORM_VARIABLE
from .worker import serve

PRELOADED: Final = (
    *("torch", "torch.distributed", "megatron.core", "ascend_run.core.run"),
    *("ascend_run.core.model.build", "ascend_run.testing.kit", "ascend_run.testing.trial_work"),
    "ascend_run.testing.dry_run",
)
"""What any trial imports, of which torch and Megatron take seconds. No plugins."""
REQUEST: Final = struct.Struct("=Qd")
"""Number of a rank, and the seconds after which it is killed if it has not ended. With two file
descriptors, the rank's end of its pipe and its log, it starts this rank instead."""
REPLY: Final = struct.Struct("=Qi")
"""Number of a rank that has ended, and its exit code as in subprocess."""
_POLL_SECONDS: Final = 0.002


def serve_requests(descriptor: int, preloaded: Sequence[str] = PRELOADED) -> None:
    """Start and end ranks until the other end of the socket is closed, which it is when the process
    that holds it has ended in any way; then end the ranks that are left.

    Returns in each forked rank too, at its end, so that a rank ends like any process.

    Args:
        descriptor: Socket of the requests, a stream of messages of one size.
        preloaded: Modules to import.
    """
    # Ctrl-C reaches all processes of a terminal; this one ends with the one that started it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    forks = _can_fork(preloaded)
    with socket.socket(fileno=descriptor) as requests:
        rank = _serve(requests, forks=forks)
    if rank is None:
        os._exit(0)  # nothing is left to do, and to take torch down takes time
    _become(*rank)


def _can_fork(modules: Sequence[str]) -> bool:
    """Import modules; return whether ranks can be forks of this process then."""
    if sys.platform != "linux" or os.environ.get(PLATFORM_VARIABLE, "cpu") != "cpu":
        return False
    gc.disable()  # imports leave little garbage, and collections take a second
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's, about each missing optional library
        for name in modules:
            module = importlib.import_module(name)
            if name == "torch" and module.accelerator.is_available():
                return False
    gc.enable()
    gc.freeze()  # a collection in a fork would copy the pages of all these objects
    return len(os.listdir("/proc/self/task")) == 1


def _serve(requests: socket.socket, *, forks: bool) -> tuple[int, int] | None:
    """Serve requests; in a forked rank, return its pipe and its log."""
    processes: dict[int, int] = {}
    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, REQUEST.size, 2)
        if not data:
            break
        number, seconds = REQUEST.unpack(data)
        if descriptors:
            pipe, log = descriptors
            processes[number] = os.fork() if forks else _new_interpreter(pipe, log)
            if processes[number] == 0:
                return pipe, log
            os.close(pipe)
            os.close(log)
        elif number in processes:
            code = _exit_code(processes.pop(number), seconds)
            with contextlib.suppress(ConnectionError):
                requests.send(REPLY.pack(number, code))
    for process in processes.values():
        _exit_code(process, 0.0)
    return None


def _exit_code(process: int, seconds: float) -> int:
    """Wait until a child has ended, and kill it after this time; return its exit code."""
    deadline = time.monotonic() + seconds
    options = os.WNOHANG
    while True:
        ended, status = os.waitpid(process, options)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            os.kill(process, signal.SIGKILL)
            options = 0
        else:
            time.sleep(_POLL_SECONDS)


def _new_interpreter(pipe: int, log: int) -> int:
    """Start a rank that imports everything itself; return its process id."""
    os.set_inheritable(pipe, True)
    code = f"from {serve.__module__} import serve; serve({pipe})"
    outputs = [(os.POSIX_SPAWN_DUP2, log, stream) for stream in (1, 2)]
    # SIGINT is ignored here, and what is ignored stays so in a new program.
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-P", "-c", code],
        os.environ,
        file_actions=outputs,
        setsigdef=[signal.SIGINT],
    )


def _become(pipe: int, log: int) -> None:
    """Run in the fork: serve as the rank of a pool, as a new interpreter would."""
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    os.set_inheritable(pipe, False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()  # forks would draw the same numbers
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    importlib.invalidate_caches()
    serve(pipe)
