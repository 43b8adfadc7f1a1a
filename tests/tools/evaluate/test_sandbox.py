"""Programs that do what they should not: each fails, and for its own reason."""

import os
import socket
import struct
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ascend_run.tools.evaluate.sandbox import Limits, Outcome, SandboxError, run_program, runner
from ascend_run.tools.evaluate.sandbox.process_filter import process_filter

pytestmark = pytest.mark.usefixtures("sandbox")
LIMITS = Limits(seconds=20.0, memory_bytes=1 << 28)
SHORT = Limits(seconds=0.3)


def run(program: str, limits: Limits = LIMITS) -> Outcome:
    return run_program(program, limits)


def failure(program: str, limits: Limits = LIMITS) -> str:
    outcome = run(program, limits)
    assert not outcome.passed
    return outcome.how


def test_a_program_passes_if_its_last_line_is_reached() -> None:
    assert run("import math\nassert math.sqrt(4) == 2") == Outcome(
        passed=True, how="its tests passed"
    )
    assert failure("x = [1]\nassert x == [2], 'two'\n") == (
        "AssertionError: two, by assert x == [2], 'two'"
    )
    assert failure("def f(:") == "SyntaxError: invalid syntax (program, line 1)"


@pytest.mark.parametrize(
    ("program", "how"),
    [
        ("exit(0)", "SystemExit: 0, by exit(0)"),
        ("import sys\nsys.exit()", "SystemExit, by sys.exit()"),
        ("import os\nos._exit(0)", "ended before its tests did"),
        ("import os\nos._exit(4)", "ended before its tests did"),
        ("import os\nos.kill(os.getpid(), 9)", "killed by signal 9 (Killed)"),
        ("import os\nos.kill(0, 9)", "killed by signal 9 (Killed)"),
        ("import os\nos.kill(os.getppid(), 2)\nos._exit(0)", "ended before its tests did"),
        ("import os\nos.kill(os.getpid(), 2)", "KeyboardInterrupt, by os.kill(os.getpid(), 2)"),
        ("import os\nos.kill(os.getpid(), 33)", "killed by signal 33"),  # of no name
        ("import ctypes\nctypes.string_at(0)", "killed by signal 11 (Segmentation fault)"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt, by raise KeyboardInterrupt"),
        ("class E(Exception):\n def __str__(self): exit(0)\nraise E", "E"),
        ("print('its tests passed')\nimport os\nos._exit(0)", "ended before its tests did"),
        ("import os\nos.write(3, b'0' * 64)\nos._exit(0)", "0" * 64),
        ("import os\nwhile True: os.write(3, bytes(9999))", "wrote to the report of its tests"),
    ],
    ids=[
        *("exit", "sys-exit", "os-exit", "exit-code", "killed", "group", "parent-interrupt"),
        *("own-interrupt", "nameless", "segfault", "interrupt", "message"),
        *("print", "report", "flood"),
    ],
)
def test_an_end_before_the_last_line_is_no_success(program: str, how: str) -> None:
    assert failure(program) == how


def test_what_is_written_beside_the_report_makes_it_void() -> None:
    assert (
        failure("import os\nfor n in range(9):\n try: os.write(n, b'x')\n except OSError: 1") != ""
    )


def test_the_token_is_in_no_variable() -> None:
    program = """
import os, sys
frame, seen = sys._getframe(), []
while frame:
    for one in (frame.f_locals, frame.f_globals):
        seen += one.values()
    frame = frame.f_back
assert len(seen) > 50
assert not [one for one in seen if isinstance(one, bytes) and len(one) == 64]
assert os.read(0, 64) == b""
"""
    assert run(program).passed


@pytest.mark.parametrize(
    ("program", "how"),
    [
        ("import os\nwhile True: os.fork()", "BlockingIOError: [Errno 11]"),
        ("import subprocess\nsubprocess.run(['x'])", "BlockingIOError: [Errno 11]"),
        (
            "import threading\nwhile True: threading.Thread(target=threading.Event().wait).start()",
            "RuntimeError: can't start new thread",
        ),
        ("bytearray(1 << 40)", "MemoryError, by bytearray(1 << 40)"),
        ("x = [0]\nwhile True: x += x", "MemoryError, by while True: x += x"),
        ("open('x', 'wb').write(bytes(1 << 21))", "OSError: [Errno 27] File too large"),
        ("files = [open(__import__('os').__file__) for _ in range(99)]", "OSError: [Errno 24] Too"),
        ("open('/etc/passwd')", "FileNotFoundError"),
        (
            "open(__import__('os').__file__, 'r+')",
            "OSError: [Errno 30] Read-only file system",
        ),
        ("import os\nos.chroot('/')", "PermissionError"),
        ("import os\nos.setuid(12345)", "OSError"),
        ("import os\nos.mknod('x', 0o60600, 5)", "PermissionError"),
    ],
    ids=[
        *("fork-bomb", "subprocess", "threads", "memory", "growth", "large-file", "many-files"),
        *("read", "write", "chroot", "user", "device"),
    ],
)
def test_limits_and_walls(program: str, how: str) -> None:
    assert failure(program).startswith(how)


def test_all_files_together_have_a_limit() -> None:
    """16 times that of one: of 1 MiB each, the 17th has no room."""
    program = """
for number in range(17):
    with open(str(number), "wb", 0) as file:
        assert file.write(bytes(1 << 20)) == 1 << 20, number
"""
    how = "OSError: [Errno 28] No space left on device, by assert file.write"
    assert failure(program).startswith(how)
    assert run(program.replace("17", "16")).passed


def test_nothing_of_this_process_is_there(tmp_path: Path) -> None:
    program = f"""
import os
assert not os.environ and not os.listdir() and os.getcwd() == "/tmp"
assert not os.path.exists({str(tmp_path)!r}) and not os.path.exists("/proc")
def is_open(number):
    try:
        return bool(os.fstat(number))
    except OSError:
        return False
assert [*filter(is_open, range(64))] == [0, 1, 2, 3]
open("x", "w").write("y")
try:
    os.kill({os.getpid()}, 9)
except ProcessLookupError:
    pass
else:
    raise AssertionError
os.kill(os.getppid(), 9)
"""
    assert run(program) == Outcome(passed=True, how="its tests passed")


def answer_of(machine: str, arch: int, number: int, flags: int = 0) -> int:
    """Interpret a filter."""
    steps = [*struct.iter_unpack("=HBBI", process_filter(machine))]
    data = struct.pack("=iIQ6Q", number, arch, 0, flags, *[0] * 5)
    value = at = 0
    while True:
        code, yes, no, k = steps[at]
        if code == 0x06:
            return k
        if code == 0x20:
            (value,) = struct.unpack_from("=I", data, k)
        else:
            holds = {0x15: value == k, 0x45: bool(value & k), 0x35: value >= k}[code]
            at += yes if holds else no
        at += 1


# By x86_64 and by aarch64: Linux's asm/unistd_64.h and asm-generic/unistd.h.
NUMBERS = """
unshare 272 97
shmget 29 194
shmat 30 196
semget 64 190
msgget 68 186
add_key 248 217
request_key 249 218
keyctl 250 219
perf_event_open 298 241
memfd_create 319 279
bpf 321 280
userfaultfd 323 282
memfd_secret 447 447
io_uring_setup 425 425
io_uring_enter 426 426
io_uring_register 427 427
"""
ROWS = [line.split() for line in NUMBERS.split("\n") if line]
NOT_PERMITTED = {
    "x86_64": {name: int(number) for name, number, _ in ROWS},
    "aarch64": {name: int(number) for name, _, number in ROWS},
}


@pytest.mark.parametrize(
    ("machine", "arch", "calls"),
    [
        ("x86_64", 0xC000003E, {"fork": 57, "vfork": 58, "clone": 56, "mmap": 9, "write": 1}),
        ("aarch64", 0xC00000B7, {"clone": 220, "mmap": 222, "write": 64}),
    ],
)
def test_the_filter_of_each_processor(machine: str, arch: int, calls: dict[str, int]) -> None:
    allow, error, kill = 0x7FFF0000, 0x00050000, 0x80000000
    errors = {"fork": 11, "vfork": 11, "clone": 11, **dict.fromkeys(NOT_PERMITTED[machine], 1)}
    for name, number in (calls | NOT_PERMITTED[machine]).items():
        wanted = error | errors[name] if name in errors else allow
        assert answer_of(machine, arch, number) == wanted
    assert answer_of(machine, arch, 435) == error | 38  # clone3
    assert answer_of(machine, arch, calls["clone"], flags=0x00010000 | 0x100) == allow
    assert answer_of(machine, arch, calls["clone"], flags=0x01200011) == error | 11
    assert answer_of(machine, arch ^ 1, calls["write"]) == kill
    assert answer_of(machine, arch, 0x40000000 | calls["write"]) == kill


def test_there_is_no_memory_beside_what_is_limited() -> None:
    """Shared memory is in no address space while it is detached."""
    numbers = NOT_PERMITTED[os.uname().machine]
    program = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def error_of(*words):
    return 0 if libc.syscall(*map(ctypes.c_long, words)) >= 0 else ctypes.get_errno()
assert error_of({numbers["shmget"]}, 0, 1 << 20, 0o1600) == 1
name = ctypes.addressof(ctypes.create_string_buffer(b"x"))
assert error_of({numbers["memfd_create"]}, name, 0) == 1
for number in {[*numbers.values()]}:
    assert error_of(number, *[0] * 6) == 1, number
"""
    assert run(program).how == "its tests passed"


def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        host, port = server.getsockname()
        program = f"import socket\nsocket.create_connection(({host!r}, {port}))"
        assert failure(program).startswith("OSError: [Errno 101] Network is unreachable")
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time\nwhile True:\n try: time.sleep(9)\n except BaseException: pass",
        "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
        "import signal\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)\nwhile True: print(n)",
    ],
    ids=["loop", "sleep", "stopped", "prints"],
)
def test_time_and_what_a_program_leaves(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[int] = []

    class Started(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            groups.append(self.pid)

    monkeypatch.setattr(subprocess, "Popen", Started)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert failure(f"open('x', 'w')\n{program}", SHORT) == "timed out after 0.3 s"
    assert not [*tmp_path.iterdir()]
    (group,) = groups
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)


def test_a_machine_that_confines_nothing_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "runner.py"
    monkeypatch.setattr(runner, "__file__", str(script))
    script.write_text(
        "import os, sys\nos.write(1, sys.stdin.buffer.read()[-64:] + b'unshare: no')\n"
    )
    with pytest.raises(SandboxError, match=r"^unshare: no$"):
        run("")
    for code in (1, 130):  # 130: as killed by signal 66, which no system has
        script.write_text(f"raise SystemExit({code})")
        with pytest.raises(SandboxError, match=f"the process of the sandbox ended with {code}$"):
            run("")
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="s390x"))
    with pytest.raises(SandboxError, match="the system calls of the processor s390x are unknown"):
        run("")
