"""Runs one program in namespaces of its own, and reports whether its last line was reached.

A script: ``python -I runner.py`` in an empty folder, with an empty environment. Its stdin has a
line with the length of a request, the request as JSON, and a token; its stdout takes the report:

- the token alone: the last line was reached;
- the token and a text: the program could not be confined, and was not run;
- anything else: why the program failed, or what it wrote there.

Three processes: this one waits and ends the others in time; the second is the init of a PID
namespace, so that its end ends all that is in there; the third is confined, and runs the program.
Linux, standard library only. Interfaces: man 7 user_namespaces, 2 seccomp, 2 mount.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NoReturn

REPORT: Final = 3
"""The file that takes the report."""
FAILED: Final = 1
TIMED_OUT: Final = 4
"""Exit codes of the first process; 0: the program ended by itself."""
KILLED: Final = 64
"""Exit code of a program that a signal has ended, less the number of the signal."""
TOKEN_BYTES: Final = 64
_REASON_BYTES: Final = 1000

_NAMESPACES: Final = {
    "mount": 0x00020000,
    "UTS": 0x04000000,
    "IPC": 0x08000000,
    "user": 0x10000000,
    "PID": 0x20000000,
    "network": 0x40000000,
}
_RDONLY, _NOSUID, _NODEV, _NOEXEC = 1, 2, 4, 8
_REMOUNT, _BIND, _REC, _PRIVATE = 1 << 5, 1 << 12, 1 << 14, 1 << 18
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_CAPABILITY_VERSION: Final = 0x20080522

_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> None:
    """Call a function of libc.

    Raises:
        OSError: It failed.
    """
    words = [ctypes.c_ulong(one) if isinstance(one, int) else one for one in arguments]
    if getattr(_LIBC, name)(*words) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _end_with_parent() -> None:
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def enter_namespaces() -> None:
    """Leave the network, the processes and the mounts of the machine; children are in there.

    Raises:
        OSError: The kernel, or what confines this process, does not allow it.
    """
    user, group = os.geteuid(), os.getegid()
    _call("unshare", sum(_NAMESPACES.values()))
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _libraries() -> Iterator[str]:
    """Yield the folders that imports read, none within another."""
    wanted = {"/lib", "/lib64", "/usr/lib", "/usr/lib64", os.path.join(sys.base_prefix, "lib")}
    prefixes = (f"{sys.base_prefix}/", f"{sys.prefix}/")
    wanted |= {path for path in sys.path if path.startswith(prefixes)}
    for path in sorted(wanted):
        if os.path.isdir(path) and not any(path.startswith(f"{one}/") for one in wanted):
            yield path


def enter_empty_root(folder: str, num_bytes: int) -> None:
    """Make a folder the root: files of the program in memory, and Python's libraries to read.

    Raises:
        OSError: It is not allowed.
    """
    _mount(None, "/", _REC | _PRIVATE)
    _mount("tmpfs", folder, _NOSUID | _NODEV, f"size={num_bytes},nr_inodes=1000,mode=755")
    for path in _libraries():
        within = folder + path
        os.makedirs(os.path.dirname(within), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), within)
            continue
        os.mkdir(within)
        _mount(path, within, _BIND | _REC)
        for point in _mounts(within):
            # What is mounted without permission to execute has to stay so.
            kept = os.statvfs(point).f_flag & _NOEXEC
            _mount(None, point, _BIND | _REMOUNT | _RDONLY | _NOSUID | _NODEV | kept)
    os.mkdir(f"{folder}/tmp")
    os.chroot(folder)
    os.chdir("/tmp")


def _mount(source: str | None, target: str, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, options)]
    kind = b"tmpfs" if options else None
    _call("mount", texts[0], texts[1], kind, flags, texts[2])


def _mounts(folder: str) -> list[str]:
    """Return the folder and the mounts below it."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        points = [line.split(" ")[4] for line in file]
    plain = [re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), one) for one in points]
    return [folder, *(point for point in plain if point.startswith(f"{folder}/"))]


def _limit(seconds: float, memory_bytes: int, file_bytes: int) -> None:
    for limit, value in (
        (resource.RLIMIT_CPU, math.ceil(seconds) + 1),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NPROC, 64),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        _, most = resource.getrlimit(limit)
        least = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(limit, (least, least))


def _drop_capabilities() -> None:
    """Give up for good what the user namespace gave."""
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    _call("capset", header, (ctypes.c_uint32 * 6)())


def _forbid_processes(instructions: bytes) -> None:
    """Install a filter of calls, as ``process_filter`` returns it."""
    code = ctypes.create_string_buffer(instructions)
    program = struct.pack("@HP", len(instructions) // 8, ctypes.addressof(code))
    _call("prctl", _PR_SET_SECCOMP, 2, program, 0, 0)


def _run(program: str, write: Callable[[int, bytes], int], read: Callable[..., bytes]) -> None:
    """Run the program, and report.

    The token is read only now, and kept where neither variables nor attributes show it to the
    program: among the operands of an expression, of which the program's run is one.
    """
    space: dict[str, Any] = {"__name__": "program"}
    try:
        code = compile(program, "program", "exec")
        write(REPORT, (read(0, TOKEN_BYTES), exec(code, space))[0])  # type: ignore[func-returns-value]
    except BaseException as error:
        space.clear()
        write(REPORT, _reason(error, program.splitlines()))


def _reason(error: BaseException, lines: Sequence[str]) -> bytes:
    """Return the error with the line of the program that led to it."""
    name = type(error).__name__
    try:
        text = str(error)
        number, trace = 0, error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == "program":
                number = trace.tb_lineno
            trace = trace.tb_next
        line = lines[number - 1].strip() if 0 < number <= len(lines) else ""
        parts = [name, f": {text}" if text else "", f", by {line}" if line else ""]
        return "".join(parts).encode("utf-8", "replace")[:_REASON_BYTES]
    except BaseException:  # of the program's own
        return name.encode("utf-8", "replace")[:_REASON_BYTES]


def _confined(
    program: str, instructions: str, seconds: float, memory_bytes: int, file_bytes: int
) -> NoReturn:
    """Be the third process."""
    try:
        os.setsid()  # a signal to its group reaches no process outside
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        _limit(seconds, memory_bytes, file_bytes)
        _drop_capabilities()
        _forbid_processes(bytes.fromhex(instructions))
    except OSError as error:
        _refuse(error)
    _run(program, os.write, os.read)
    os._exit(0)


def _refuse(error: OSError) -> NoReturn:
    where = "" if error.filename is None else f"{error.filename}: "
    os.write(REPORT, os.read(0, TOKEN_BYTES) + f"{where}{error.strerror}".encode())
    os._exit(0)


def _init(*request: Any) -> NoReturn:
    """Be the second process."""
    _end_with_parent()
    # The one signal that the program could end this process by: Python has a handler of it.
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not (child := os.fork()):
        signal.signal(signal.SIGINT, interrupt)
        _confined(*request)
    _, status = os.waitpid(child, 0)
    os._exit(KILLED + os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0)


def _read_request() -> list[Any]:
    length = b""
    while not length.endswith(b"\n"):
        length += _read(1)
    content = b""
    while len(content) < int(length):
        content += _read(int(length) - len(content))
    request: list[Any] = json.loads(content)
    return request


def _read(most: int) -> bytes:
    if not (found := os.read(0, most)):
        os._exit(FAILED)  # who asks has ended
    return found


def main() -> NoReturn:
    os.environ.clear()
    os.dup2(1, REPORT)
    os.dup2(2, 1)
    program, instructions, seconds, memory_bytes, file_bytes = _read_request()
    try:
        folder = os.getcwd()
        enter_namespaces()
        _end_with_parent()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        enter_empty_root(folder, 16 * file_bytes)
        child = os.fork()
    except OSError as error:
        _refuse(error)
    if not child:
        _init(program, instructions, seconds, memory_bytes, file_bytes)
    if signal.sigtimedwait({signal.SIGCHLD}, seconds) is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os._exit(TIMED_OUT)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(code if code >= 0 else FAILED)


if __name__ == "__main__":
    main()
