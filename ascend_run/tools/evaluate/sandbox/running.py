"""Start a program in the sandbox, and say how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Final

import attrs

from . import runner
from .process_filter import process_filter

_START_SECONDS: Final = 30.0
"""Until an interpreter has started, at most, on a machine that does much else."""
_MOST_BYTES: Final = 4096


@attrs.frozen(kw_only=True)
class Limits:
    """What one program may take."""

    seconds: float = 3.0  #: From its begin to its end.
    memory_bytes: int = 1 << 30  #: Address space, with the interpreter's.
    file_bytes: int = 1 << 20  #: Of each file.


@attrs.frozen(kw_only=True)
class Outcome:
    """How a program ended."""

    passed: bool  #: Whether its last line was reached.
    how: str


class SandboxError(Exception):
    """A program cannot be confined here, and was not run; the message says what was refused."""


def run_program(program: str, limits: Limits) -> Outcome:
    """Run a Python program from its first line to its last, confined, and drop what it prints.

    It sees Python's libraries, and an empty folder that is in memory; see ``runner``.

    Raises:
        SandboxError: It cannot be confined.
    """
    token = secrets.token_hex(runner.TOKEN_BYTES // 2).encode()
    machine = os.uname().machine
    try:
        instructions = process_filter(machine).hex()
    except KeyError:
        raise SandboxError(f"the system calls of the processor {machine} are unknown") from None
    request = json.dumps(
        [program, instructions, limits.seconds, limits.memory_bytes, limits.file_bytes]
    ).encode()
    with tempfile.TemporaryDirectory(prefix="ascend-run-program-") as folder:
        # A fresh interpreter: a fork of this process would have its memory, threads and files.
        process = subprocess.Popen(
            [sys.executable, "-I", str(Path(runner.__file__).absolute())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = time.monotonic() + _START_SECONDS + limits.seconds
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
                stdin.write(b"%d\n%s%s" % (len(request), request, token))
            with process.stdout as stdout:
                said = _read(stdout, deadline)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
    return _outcome(said, token, code, limits)


def _read(stream: IO[bytes], deadline: float) -> bytes:
    """Read to the end, or until there is too much or it is too late."""
    said, poll = b"", select.poll()
    poll.register(stream, select.POLLIN)
    while len(said) <= _MOST_BYTES:
        if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
            break
        if not (piece := os.read(stream.fileno(), _MOST_BYTES)):
            break
        said += piece
    return said


def _outcome(said: bytes, token: bytes, code: int, limits: Limits) -> Outcome:
    """
    Raises:
        SandboxError: The program was not run.
    """
    if said.startswith(token) and said != token:
        raise SandboxError(said.removeprefix(token).decode(errors="replace"))
    if code == runner.TIMED_OUT:
        return Outcome(passed=False, how=f"timed out after {limits.seconds:g} s")
    if 0 < (number := code - runner.KILLED) < signal.NSIG:
        name = signal.strsignal(number)
        return Outcome(passed=False, how=f"killed by signal {number}{f' ({name})' if name else ''}")
    if len(said) > _MOST_BYTES:
        return Outcome(passed=False, how="wrote to the report of its tests")
    if code != 0:
        raise SandboxError(f"the process of the sandbox ended with {code}")
    if said == token:
        return Outcome(passed=True, how="its tests passed")
    if not said:
        return Outcome(passed=False, how="ended before its tests did")
    return Outcome(passed=False, how=said.decode(errors="replace"))
