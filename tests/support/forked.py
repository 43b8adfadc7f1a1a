"""Processes that begin with torch, Megatron and the commands imported: a fork takes milliseconds, a
new interpreter seconds.

All are forks of one process that does nothing but import (``preloaded``), so each begins as any
other. Where an import starts a thread or there is an accelerator, each becomes a new interpreter
(``testing.fork_server`` says why). What only a new interpreter has, such as a seed of string hashes
and the warnings of imports, is left to tests of true processes.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NoReturn

import attrs

from ascend_run.entrypoints import cli

PRELOADED: Final = "tests.support.preloaded"
OF_PRELOADED: Final = {
    "OMP_NUM_THREADS": "1",  # or BLAS starts threads
    "TORCHDYNAMO_DISABLE": "1",  # Megatron asks for torch's compiler, a third of its import's time
}
"""Variables of the imports, and of commands; nothing compiles."""
OF_RANKS: Final = ("RANK", "WORLD_SIZE")
_POLL_SECONDS: Final = 0.01


@attrs.frozen(kw_only=True)
class Setup:
    """What a fork is given before it runs."""

    arguments: Sequence[str]
    """What stands behind ``sys.argv[0]``."""
    environment: Mapping[str, str]
    folder: Path
    """Working directory."""
    ranks: int
    """As many of the ranks that it starts are forks too; 0: all are new interpreters."""
    file_bytes: int | None
    """No file may grow longer; the system refuses."""


class Forked:
    """A function in a process and session of its own, with the methods of ``Popen`` that the tests
    of runs and of the launcher use.

    Args:
        main: Returns the exit code, or exits; importable by name.
        folder: For the files of standard output and error.
        working_folder: Default: that of the caller.

    For the others see ``Setup``.
    """

    def __init__(
        self,
        main: Callable[[], int | None],
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        *,
        working_folder: Path | None = None,
        ranks: int = 0,
        file_bytes: int | None = None,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([PRELOADED])
        own = Path(tempfile.mkdtemp(dir=folder))
        self._files = [own / name for name in ("out", "err")]
        setup = Setup(
            arguments=[*arguments],
            environment={**environment},
            folder=working_folder or Path.cwd(),
            ranks=ranks,
            file_bytes=file_bytes,
        )
        self._process = context.Process(target=_become, args=(main, setup, self._files))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code; if a signal has killed the process, its number below zero."""
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = 100.0) -> tuple[str, str]:
        """Wait for the end; return standard output and error.

        Raises:
            TimeoutError: The process still ran, and has been killed.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            self.kill()
            raise TimeoutError(f"process {self.pid} still ran after {timeout:g} s")
        output, errors = (
            path.read_text(encoding="utf-8") if path.exists() else "" for path in self._files
        )
        return output, errors


def forked_command(
    folder: Path, *words: str, variables: Mapping[str, str] | None = None, **setup: Any
) -> Forked:
    """The command line ``ascend-run WORDS`` in a folder, as a rank of no run."""
    kept = {name: value for name, value in os.environ.items() if name not in OF_RANKS}
    environment = {**kept, **OF_PRELOADED, **(variables or {})}
    return Forked(cli.main, words, environment, folder, working_folder=folder, **setup)


def printed_by(
    main: Callable[[], int | None], words: Sequence[str | Path], folder: Path
) -> dict[str, Any]:
    """Return the JSON object in the last line that a worker of the benchmarks prints."""
    process = Forked(main, [*map(str, words)], {**os.environ, **OF_PRELOADED}, folder)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def _become(main: Callable[[], int | None], setup: Setup, files: Sequence[Path]) -> NoReturn:
    """Run in the fork: what a new process would be given."""
    os.setsid()
    for descriptor, path in enumerate((Path(os.devnull), *files)):
        flags = os.O_RDWR | os.O_CREAT if descriptor else os.O_RDONLY
        os.dup2(os.open(path, flags, 0o600), descriptor)
    assert PRELOADED in sys.modules, "an import has failed"
    os.environ.clear()
    os.environ.update(setup.environment)
    os.chdir(setup.folder)
    if setup.file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (setup.file_bytes, setup.file_bytes))
    if not _is_as_new():
        run = f"from {main.__module__} import {main.__name__} as main; raise SystemExit(main())"
        os.execv(sys.executable, [sys.executable, "-c", run, *setup.arguments])
    sys.argv[1:] = setup.arguments
    if setup.ranks:
        _fork_ranks(setup.ranks)
    sys.exit(main())


def _is_as_new() -> bool:
    """Whether this fork lacks nothing that its parent has, such as threads."""
    if sys.platform != "linux" or sys.modules["torch"].accelerator.is_available():
        return False
    return len(os.listdir(f"/proc/{os.getppid()}/task")) == 1


def _fork_ranks(count: int) -> None:
    """Make the ranks that torch's agent starts in this process forks of it, as it is now: it may
    have threads when they are started."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    waiting: list[tuple[int, Connection]] = []
    for _ in range(count):
        theirs, ours = multiprocessing.Pipe(duplex=False)
        waiting.append((os.fork(), ours))
        if waiting[-1][0] == 0:
            for _, other in waiting:  # or none would notice that the agent has ended
                other.close()
            _wait_and_be_a_rank(theirs)
        theirs.close()

    def started(self: Any, words: Sequence[str], environment: Mapping[str, str]) -> ForkedRank:
        *interpreter, module = words
        assert interpreter == [sys.executable, "-P", "-m"], words
        assert self._stdout is self._stderr is None
        pid, pipe = waiting.pop(0)
        with pipe:
            pipe.send((module, environment))
        return ForkedRank(pid)

    SubprocessHandler._popen = started


def _wait_and_be_a_rank(pipe: Connection) -> NoReturn:
    code: Any = 1
    try:
        os.setsid()  # at once: a signal to the agent's session is none to a rank
        module, environment = pipe.recv()
        pipe.close()
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:] = [path for path in sys.path if path]  # -P
        code = importlib.import_module(module).main()
    except EOFError:  # it was not needed
        pass
    except SystemExit as done:
        code = done.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if code is None else code if isinstance(code, int) else 1)


class ForkedRank:
    """A child with the methods of ``Popen`` that torch's agent uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout or 0.0)
            time.sleep(_POLL_SECONDS)
        return code
