"""Start the processes of ranks, most of them as forks of a process that has imported torch.

Python cannot change its seed of string hashes, and forks have equal ones. Ranks that depend on the
order of a set would go unnoticed then, so there are two servers for each environment: neighbouring
ranks, and a rank before and after a restart, are forks of different ones.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, Final

import attrs

from . import fork_server
from .fork_server import PRELOADED, REPLY, REQUEST
from .session_pool import SESSION_SERVERS
from .worker import Start

NUM_SEEDS: Final = 2
"""Servers for each environment."""
_MOST_SERVERS: Final = 3 * NUM_SEEDS
"""More are only kept while they have ranks. Each holds about 340 MB of memory."""
_REPLY_SECONDS: Final = 60.0
"""Time for a server that still imports, on a loaded machine."""
_END_SECONDS: Final = 5.0
"""Time for a server that has closed its socket to end."""
_LOG_BYTES: Final = 4000
_SET_LATER: Final = frozenset({"PYTHONPATH", "PYTEST_CURRENT_TEST", "OMP_NUM_THREADS"})
"""Variables that a rank may be given after its imports. All others may be read by a library when it
is loaded. A rank sets its number of threads by itself."""


@attrs.frozen(eq=False)
class RankProcess:
    """One rank that a server has started."""

    _server: ForkServer
    _number: int

    def exit_code(self, seconds: float) -> int:
        """Wait until it has ended, and kill it after this time. To be called once.

        Returns:
            Its exit code as in subprocess; the server's if that has ended before.
        """
        return self._server.end(self._number, seconds)

    def kill(self, *, wait: bool = True) -> None:
        """Kill it.

        Args:
            wait: Until it has ended; a server that still imports ends it after that.
        """
        self._server.end(self._number, 0.0, wait=wait)

    def server_log(self) -> str:
        """Return what the server has printed: why it has ended, if it has."""
        return self._server.log()


class ForkServer:
    """A process from which ranks are forked; it ends with this one.

    Args:
        environment: Its variables.
        preloaded: Modules that it imports.
    """

    def __init__(
        self, environment: Mapping[str, str], preloaded: Sequence[str] = PRELOADED
    ) -> None:
        self._socket, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed with the server
        module = fork_server.__name__
        call = f"serve_requests({theirs.fileno()}, {tuple(preloaded)!r})"
        with theirs:
            self._process = subprocess.Popen(
                # -P keeps modules in the current folder from shadowing libraries.
                [sys.executable, "-P", "-c", f"from {module} import serve_requests; {call}"],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env={**environment, "OMP_NUM_THREADS": "1"},  # or BLAS starts threads
            )
        self._numbers = itertools.count()
        self._alive: set[int] = set()
        self._lock = threading.Lock()

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def is_idle(self) -> bool:
        """Whether it has no ranks."""
        return not self._alive

    def start(self, start: Start, log: IO[bytes]) -> tuple[RankProcess, Connection]:
        """Start a rank, without waiting for it; return it and our end of its pipe."""
        ours, theirs = Pipe()
        number = next(self._numbers)
        # If the server has ended, the pipe has no other end: the pool finds a rank that has died.
        self._alive.add(number)
        with theirs, contextlib.suppress(ConnectionError):
            files = [theirs.fileno(), log.fileno()]
            socket.send_fds(self._socket, [REQUEST.pack(number, 0.0)], files)
        with contextlib.suppress(ConnectionError):
            ours.send_bytes(pickle.dumps(start))
        return RankProcess(self, number), ours

    def end(self, number: int, seconds: float, *, wait: bool = True) -> int:
        """Wait until a rank has ended, and kill it after this time; see ``RankProcess``."""
        if number not in self._alive:
            return 0  # it has been ended before
        self._alive.discard(number)
        with self._lock, contextlib.suppress(ConnectionError, TimeoutError):
            self._socket.send(REQUEST.pack(number, seconds))
            if not wait:
                return 0
            self._socket.settimeout(seconds + _REPLY_SECONDS)
            # Replies that were not waited for come first.
            while reply := self._socket.recv(REPLY.size, socket.MSG_WAITALL):
                replied, code = REPLY.unpack(reply)
                if replied == number:
                    return int(code)
        try:  # its end of the socket is closed before it has ended
            return self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL

    def log(self) -> str:
        """Return what it has printed."""
        # Not by a seek, which would move the place where the process writes.
        return os.pread(self._log.fileno(), _LOG_BYTES, 0).decode(errors="replace")

    def close(self) -> None:
        """End it and its ranks."""
        self._alive.clear()
        self._socket.close()
        try:
            self._process.wait(_REPLY_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


class ForkServers:
    """Servers for ranks of several environments, started when they are needed.

    Args:
        preloaded: Modules that each imports.
    """

    def __init__(self, preloaded: Sequence[str] = PRELOADED) -> None:
        self._preloaded = preloaded
        self._servers: dict[tuple[frozenset[tuple[str, str]], int], ForkServer] = {}
        self._lock = threading.Lock()

    def start(self, start: Start, log: IO[bytes], seed: int = 0) -> tuple[RankProcess, Connection]:
        """Start a rank, without waiting for it.

        Args:
            log: For its output.
            seed: Which of the environment's servers starts it, modulo ``NUM_SEEDS``.

        Returns:
            The process and our end of its pipe, from which it sends ``ready``.
        """
        variables = frozenset(
            (name, value) for name, value in start.environment.items() if name not in _SET_LATER
        )
        key = variables, seed % NUM_SEEDS
        with self._lock:
            server = self._servers.pop(key, None)
            if server is not None and server.has_ended:
                server.close()
                server = None
            if server is None:
                self._make_room()
                server = ForkServer(start.environment, self._preloaded)
            self._servers[key] = server  # the one used last comes last
            return server.start(start, log)

    def close(self) -> None:
        """End all servers and their ranks; new ones are started when they are needed."""
        for server in self._servers.values():
            server.close()
        self._servers.clear()

    def _make_room(self) -> None:
        idle = [key for key, server in self._servers.items() if server.is_idle]
        for key in idle[: max(0, len(self._servers) + 1 - _MOST_SERVERS)]:
            self._servers.pop(key).close()


def state_of_caller(preload: str) -> Start:
    """Return what ranks take over from this process: one thread, the loopback interface.

    Args:
        preload: See ``Start``.
    """
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"}
    search_path = tuple(path for path in sys.path if path)
    environment["PYTHONPATH"] = os.pathsep.join(search_path)
    if "lo" in {name for _, name in socket.if_nameindex()}:
        # Without it gloo resolves the host name, which may have no address.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return Start(
        environment=environment, search_path=search_path, folder=os.getcwd(), preload=preload
    )


@contextmanager
def fork_servers() -> Iterator[ForkServers]:
    """The servers of the running pytest session; else new ones, which end with the block."""
    if (of_session := SESSION_SERVERS.get()) is not None:
        yield of_session()
        return
    servers = ForkServers()
    try:
        yield servers
    finally:
        servers.close()
