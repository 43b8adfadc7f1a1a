"""Ranks as forks: what they take over from the process of their pool; and that none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import attrs
import psutil
import pytest

from ascend_run.testing import fork_server
from ascend_run.testing.pool import GlooPool, PoolError
from ascend_run.testing.rank_processes import ForkServer, ForkServers, state_of_caller
from ascend_run.testing.runtime import PLATFORM_VARIABLE

from . import pool_jobs

SECONDS = 20.0
UNREAD = "ASCEND_RUN_TEST_OF_FORKS"
ORPHANS = """
import os, sys, time
from ascend_run.testing.rank_processes import ForkServer, state_of_caller
server = ForkServer({**os.environ}, ())
with open(os.devnull, "wb") as log:
    kept = [server.start(state_of_caller(""), log) for _ in range(2)]
print(server.process_id, flush=True)
time.sleep(600)
"""


def wait_until(holds: Callable[[], object]) -> bool:
    """Wait at most some seconds; return whether the condition holds."""
    for _ in range(int(SECONDS / 0.02)):
        if holds():
            return True
        time.sleep(0.02)
    return False


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process has ended, if its parent has noticed or not."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def server() -> Iterator[ForkServer]:
    """A server that has imported nothing, so that it starts at once."""
    server = ForkServer({**os.environ}, ())
    yield server
    server.close()


def test_neighbours_and_restarted_ranks_have_other_hashes() -> None:
    with closing(ForkServers(("torch", "numpy"))) as servers, GlooPool(servers=servers) as pool:
        first = pool.run(pool_jobs.origin, 3)
        with pytest.raises(PoolError):
            pool.run(pool_jobs.fail_on, 3, 1)
        again = pool.run(pool_jobs.origin, 3)
        with GlooPool(servers=servers) as other:
            beside = other.run(pool_jobs.origin, 3)
    assert first[0].parent == first[2].parent != first[1].parent
    assert first[0].hash_of_text == first[2].hash_of_text != first[1].hash_of_text
    assert [one.parent for one in again] == [first[rank].parent for rank in (1, 0, 1)]
    assert [one.parent for one in beside] == [one.parent for one in first]
    assert len({one.draw_of_numpy for one in (*first, *again, *beside)}) == 9
    assert {one.interrupts for one in first} == {True}


def test_variables_and_folder_are_those_of_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Such a variable needs no other server; see below."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.chdir(tmp_path)
    with GlooPool() as pool:
        (found,) = pool.run(pool_jobs.surroundings, 1)
    assert found == (str(tmp_path), "3", 1)


def test_a_variable_that_a_library_may_read_has_a_server_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[dict[str, str]] = []

    def started(environment: dict[str, str], preloaded: tuple[str, ...]) -> ForkServer:
        made.append(environment)
        return ForkServer(environment, preloaded)

    monkeypatch.setattr(f"{ForkServers.__module__}.ForkServer", started)
    servers = ForkServers(())
    with (tmp_path / "log").open("wb") as log:
        for name, value in (("", ""), ("OMP_NUM_THREADS", "5"), (UNREAD, "1"), ("", "")):
            with monkeypatch.context() as patch:
                if name:
                    patch.setenv(name, value)
                servers.start(state_of_caller(""), log)
    servers.close()
    assert [environment.get(UNREAD) for environment in made] == [None, "1"]


def test_a_rank_that_has_ended_is_no_zombie_and_tells_how(
    server: ForkServer, tmp_path: Path
) -> None:
    nowhere = attrs.evolve(state_of_caller(""), folder=str(tmp_path / "none"))
    with (tmp_path / "log").open("wb") as log:
        ended, _ = server.start(nowhere, log)
        killed, _pipe = server.start(state_of_caller(""), log)
    assert ended.exit_code(SECONDS) == 1
    assert killed.exit_code(0.0) == -signal.SIGKILL
    assert psutil.Process(server.process_id).children() == []
    assert "FileNotFoundError" in (tmp_path / "log").read_text()


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    server = ForkServer({**os.environ}, ("no_such_module",))
    with (tmp_path / "log").open("wb") as log:
        rank, _ = server.start(state_of_caller(""), log)
    assert rank.exit_code(SECONDS) == 1
    assert "No module named 'no_such_module'" in rank.server_log()
    server.close()


def test_server_and_ranks_end_with_a_killed_parent() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert parent.stdout is not None
    with parent:
        server = psutil.Process(int(parent.stdout.readline()))
        assert wait_until(lambda: len(server.children()) == 2)
        ranks = server.children()
        parent.kill()
    assert wait_until(lambda: has_ended(server))
    assert not any(rank.is_running() for rank in ranks), "not even as zombies"


def test_ranks_are_new_interpreters_where_an_import_has_started_a_thread(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    server = ForkServer(environment, ("tests.testing.starts_a_thread",))
    process = psutil.Process(server.process_id)
    with (tmp_path / "log").open("wb") as log:
        _, _pipe = server.start(state_of_caller(""), log)
    assert wait_until(process.children), server.log()
    (rank,) = process.children()
    assert wait_until(lambda: rank.cmdline() != process.cmdline())
    server.close()


def test_ranks_are_new_interpreters_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the start that differs: the job itself runs on the CPU."""
    monkeypatch.setenv(PLATFORM_VARIABLE, "cuda")
    with GlooPool() as pool:
        (found,) = pool.run(pool_jobs.origin, 1)
        (again,) = pool.run(pool_jobs.command_line, 1)
    assert "fork_server" in psutil.Process(found.parent).cmdline()[-1]
    assert "fork_server" not in again
    assert found.interrupts


@pytest.mark.parametrize(("system", "forks"), [("linux", True), ("darwin", False)])
def test_ranks_are_forks_on_linux_only(
    system: str, forks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(os, "listdir", lambda path: [path])  # one thread
    for name in ("disable", "enable", "freeze"):
        monkeypatch.setattr(fork_server.gc, name, lambda: None)
    assert fork_server._can_fork(()) is forks
