"""Processes that begin with torch and the launcher imported: a fork takes milliseconds, a new
interpreter seconds."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

PRELOADED: Final = ["ascend_run.launch.agent", "tests.support.launch_driver"]


class Forked:
    """A function in a process and session of its own, with the methods of ``Popen`` that the tests
    of the launcher use.

    Args:
        main: Returns the exit code; importable by name.
        arguments: What stands behind ``sys.argv[0]``.
        folder: For the files of standard output and error.
    """

    def __init__(
        self,
        main: Callable[[], int],
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        own = Path(tempfile.mkdtemp(dir=folder))
        self._files = [own / name for name in ("out", "err")]
        self._process = context.Process(
            target=_become, args=(main, [*arguments], {**environment}, self._files)
        )
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

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end; return standard output and error.

        Raises:
            TimeoutError: The process still runs.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"process {self.pid} still runs after {timeout:g} s")
        output, errors = (
            path.read_text(encoding="utf-8") if path.exists() else "" for path in self._files
        )
        return output, errors


def _become(
    main: Callable[[], int],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    files: Sequence[Path],
) -> None:
    """Run in the fork: what a new process would be given."""
    os.setsid()
    for descriptor, path in enumerate((Path(os.devnull), *files)):
        flags = os.O_RDWR | os.O_CREAT if descriptor else os.O_RDONLY
        os.dup2(os.open(path, flags, 0o600), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments
    sys.exit(main())
