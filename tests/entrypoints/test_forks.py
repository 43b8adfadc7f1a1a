"""The forks in which runs and the launcher are tested are as new processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ascend_run.launch import options
from tests.support import forked
from tests.support.forked import PRELOADED, Forked, Setup

SECONDS = 60.0
ROOT = str(Path(__file__).parents[2])
FORKS = sys.platform == "linux" and not torch.accelerator.is_available()


def tell() -> int:
    """Print what this process is like, then change it; the exit code is the first argument."""
    found = {
        "arguments": sys.argv[1:],
        "folder": os.getcwd(),
        "variables": sorted({*os.environ} - {"LC_CTYPE"}),  # which an interpreter may set
        "marks": [hasattr(module, "mark") for module in (options, json)],
        "threads": len(os.listdir("/proc/self/task")),
        "leads a session": os.getsid(0) == os.getpid(),
        "was preloaded": PRELOADED in sys.modules and "megatron.core" in sys.modules,
    }
    print(json.dumps(found), flush=True)
    print("an error", file=sys.stderr)
    options.mark = json.mark = os.environ["MARK"] = "1"  # type: ignore[attr-defined]
    os.chdir("/")
    return int(sys.argv[1])


def hang() -> None:
    Path("pid").write_text(str(os.getpid()))
    time.sleep(600)


@pytest.mark.parametrize("code", ["0", "3"])
def test_a_fork_sees_nothing_of_an_earlier_one(tmp_path: Path, code: str) -> None:
    for _ in range(2):
        environment = {"OWN": "1", "PYTHONPATH": ROOT}
        process = Forked(tell, [code, "x"], environment, tmp_path, working_folder=tmp_path)
        output, errors = process.communicate(SECONDS)
        assert (process.returncode, errors) == (int(code), "an error\n")
        assert json.loads(output) == {
            "arguments": [code, "x"],
            "folder": str(tmp_path),
            "variables": ["OWN", "PYTHONPATH"],
            "marks": [False, False],
            "threads": 1,
            "leads a session": True,
            "was preloaded": FORKS,
        }


def test_a_fork_that_does_not_end_in_time_is_killed(tmp_path: Path) -> None:
    process = Forked(hang, [], {**os.environ}, tmp_path, working_folder=tmp_path)
    while not (tmp_path / "pid").exists():
        time.sleep(0.01)
    assert (tmp_path / "pid").read_text() == str(process.pid)
    with pytest.raises(TimeoutError, match=f"process {process.pid} still ran after 0.1 s"):
        process.communicate(0.1)
    process.communicate(SECONDS)
    assert process.returncode == -signal.SIGKILL


def become_beside_a_thread(*arguments: Any) -> None:
    forked._is_as_new = lambda: False
    forked._become(*arguments)


def test_where_a_fork_would_lack_threads_it_is_a_new_interpreter(tmp_path: Path) -> None:
    files = [tmp_path / "out", tmp_path / "err"]
    environment = {"PYTHONPATH": ROOT}
    setup = Setup(
        arguments=["4"], environment=environment, folder=tmp_path, ranks=1, file_bytes=None
    )
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=become_beside_a_thread, args=(tell, setup, files))
    process.start()
    process.join(SECONDS)
    found = json.loads(files[0].read_text())
    assert process.exitcode == 4, files[1].read_text()
    assert (found["arguments"], found["was preloaded"]) == (["4"], False)
    assert found["folder"] == str(tmp_path)
