"""The launcher with stand-in ranks: each failure in its own process tree, with a timeout."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[3]
FRAME = "Traceback (most recent call last):"


def start(folder: Path, function: str, **options: Any) -> subprocess.Popen[str]:
    """The driver with 2 ranks, in a session of its own."""
    request = {"folder": str(folder), "text": "$local_rank $$ 'x' \u00e9"}
    chosen = {"nproc": 2, "grace_seconds": 1, **options}
    driver = [sys.executable, "-m", "tests.support.launch_driver", function]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [*driver, json.dumps(request), json.dumps(chosen)],
        env={**environment, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and standard error; what is left after the timeout is killed."""
    code, errors, _ = finish_with_notes(process)
    return code, errors


def finish_with_notes(process: subprocess.Popen[str]) -> tuple[int, str, list[Any]]:
    """The same, and what the launcher told: failures, and whether rank 0 was here."""
    try:
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    notes = [json.loads(line) for line in output.splitlines() if line.startswith(("[", "t", "f"))]
    return process.returncode, errors, notes


def wait_for(folder: Path, *names: str) -> None:
    for _ in range(600):
        if all((folder / name).exists() and (folder / name).read_text() for name in names):
            return
        time.sleep(0.05)
    raise AssertionError(f"the ranks did not come up: {sorted(os.listdir(folder))}")


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where ranks leave their process ids; at the end every one of them must be gone."""
    yield tmp_path
    pids = {path.name: int(path.read_text()) for path in tmp_path.glob("*.pid")}
    for _ in range(100):
        left = {name: pid for name, pid in pids.items() if is_running(pid)}
        if not left:
            return
        time.sleep(0.05)
    for pid in left.values():
        os.kill(pid, signal.SIGKILL)
    raise AssertionError(f"left behind: {left}")


def test_each_rank_is_given_its_place_and_the_request(folder: Path) -> None:
    code, errors = finish(start(folder, "write_environment"))
    assert (code, errors) == (0, "")
    seen = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert [one["RANK"] for one in seen] == [one["LOCAL_RANK"] for one in seen] == ["0", "1"]
    for one in seen:
        assert one["WORLD_SIZE"] == "2"
        assert one["MASTER_ADDR"]
        assert one["MASTER_PORT"]
        assert one["text"] == "$local_rank $$ 'x' \u00e9"


def test_a_rank_that_fails_is_named_and_a_rank_that_hangs_is_ended(folder: Path) -> None:
    code, errors = finish(start(folder, "fail_on_1"))
    lines = errors.splitlines()
    assert (code, lines[0]) == (1, f"error: rank 1: {FRAME}")
    assert lines[-1] == "ValueError: the bug of rank 1"
    assert errors.count(FRAME) == 1


def test_a_refusal_on_a_rank_has_no_traceback_and_the_users_exit_code(folder: Path) -> None:
    code, errors = finish(start(folder, "refuse_on_1"))
    assert code == 2
    assert errors == (
        "error: rank 1: the dataset is corrupt:\n  file x: truncated\n  file y: foreign\n"
    )


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("exit_3_on_1", "rank 1 ended with exit code 3"),
        ("vanish_on_1", "rank 1 ended with exit code 5"),
        ("die_on_1", "rank 1 was killed by SIGKILL, as the system does when memory runs out"),
    ],
)
def test_a_rank_that_ends_without_a_word_is_named(
    folder: Path, function: str, message: str
) -> None:
    assert finish(start(folder, function)) == (1, f"error: {message}\n")


def test_a_slow_first_failure_stands_before_its_consequences(folder: Path) -> None:
    code, errors = finish(start(folder, "fail_slowly_on_1"))
    lines = errors.splitlines()
    assert (code, lines[0]) == (1, f"error: rank 1: {FRAME}")
    assert lines[-2:] == [
        "ValueError: the first failure",
        "rank 0 then lost its connection to another rank",
    ]


def test_a_rank_that_hangs_after_its_failure_does_not_hold_up_the_run(folder: Path) -> None:
    code, errors = finish(start(folder, "fail_and_never_end_on_1"))
    assert code == 1
    assert errors.splitlines()[-1] == "ValueError: the reported failure"


def test_a_target_that_cannot_be_imported_fails_in_its_start(folder: Path) -> None:
    code, errors = finish(start(folder, "no_such_function"))
    assert code == 1
    assert "has no attribute 'no_such_function'" in errors


@pytest.mark.parametrize(
    ("number", "exit_code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
)
def test_a_signal_ends_every_rank_and_what_it_started(
    folder: Path, number: signal.Signals, exit_code: int
) -> None:
    process = start(folder, "hang_deaf")
    wait_for(folder, "rank0.pid", "rank1.pid", "child0.pid", "child1.pid")
    process.send_signal(number)
    code, errors = finish(process)
    assert code == exit_code
    assert "Traceback" not in errors


def test_a_second_signal_does_not_leave_ranks_behind(folder: Path) -> None:
    process = start(folder, "hang_deaf")
    wait_for(folder, "rank0.pid", "rank1.pid")
    for _ in range(4):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    assert finish(process)[0] == 130


def test_ranks_end_with_a_launcher_that_is_killed(folder: Path) -> None:
    process = start(folder, "hang")
    wait_for(folder, "rank0.pid", "rank1.pid")
    process.kill()
    assert finish(process)[0] == -signal.SIGKILL


def test_a_rank_killed_from_outside_is_named_and_nothing_is_left(folder: Path) -> None:
    process = start(folder, "hang")
    wait_for(folder, "rank0.pid", "rank1.pid")
    os.kill(int((folder / "rank1.pid").read_text()), signal.SIGKILL)
    code, errors = finish(process)
    assert code == 1
    assert errors.startswith("error: rank 1 was killed by SIGKILL")


def test_ranks_are_started_again_as_often_as_allowed(folder: Path) -> None:
    code, errors = finish(start(folder, "fail_once", max_restarts=2))
    assert code == 0
    assert "ValueError: the bug of rank 1" in errors
    assert errors.splitlines()[-1] == "starting all ranks again (1 of 2)"
    seen = json.loads((folder / "rank1.json").read_text())
    assert seen["ASCEND_RUN_ATTEMPT"] == "1"


def test_each_failed_attempt_is_told_by_the_rank_that_failed_first(folder: Path) -> None:
    _, _, notes = finish_with_notes(start(folder, "fail_slowly_on_1"))
    assert notes == [["rank 1: ValueError: the first failure", False]]
    again = finish_with_notes(start(folder, "fail_once", max_restarts=2))[2]
    assert again == [["rank 1: ValueError: the bug of rank 1", False], True]


def test_a_signal_is_told_as_the_end_of_the_run(folder: Path) -> None:
    process = start(folder, "hang")
    wait_for(folder, "rank0.pid", "rank1.pid")
    process.send_signal(signal.SIGTERM)
    assert finish_with_notes(process)[2] == [["ended by SIGTERM", False]]


@pytest.mark.parametrize("node_ranks", [(0, 1), (None, None)], ids=["static", "as they come"])
def test_one_of_two_nodes_has_the_first_rank(
    folder: Path, node_ranks: tuple[int | None, int | None]
) -> None:
    options = {"nproc": 1, "nnodes": 2, "rdzv_endpoint": free_endpoint()}
    nodes = [start(folder, "write_environment", node_rank=n, **options) for n in node_ranks]
    ends = [finish_with_notes(node) for node in nodes]
    assert [code for code, _, _ in ends] == [0, 0], ends
    told = [notes for _, _, notes in ends]
    assert told == [[True], [False]] or (node_ranks[0] is None and told == [[False], [True]])


def free_endpoint() -> str:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_two_nodes_meet_at_an_endpoint(folder: Path) -> None:
    options = {"nproc": 1, "nnodes": 2, "rdzv_endpoint": free_endpoint()}
    nodes = [start(folder, "write_environment", node_rank=n, **options) for n in (0, 1)]
    ends = [finish(node) for node in nodes]
    assert [code for code, _ in ends] == [0, 0], ends
    for rank in (0, 1):
        seen = json.loads((folder / f"rank{rank}.json").read_text())
        assert (seen["WORLD_SIZE"], seen["LOCAL_RANK"]) == ("2", "0")
