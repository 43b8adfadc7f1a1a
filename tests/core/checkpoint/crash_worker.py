"""Kills a save at every call it makes to the operating system, and looks at what is left.

Run as a script in a process of its own: ``python crash_worker.py FOLDER SCENARIO`` prints one JSON
object. Every save runs in forks of this process, one a rank, and this process itself starts no
thread (a fork beside one that is just ending may inherit its locks). A shim between ``os`` and the
kernel ends one rank before, after or in the middle of its n-th call. With ``power`` the crash also
takes everything that this rank had not fsynced: files lose their contents, as after a power cut.
The shim alone models the disk: no fsync goes through to it, which would take long and change
nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ascend_run.core.checkpoint import FileStore
from ascend_run.plugin_api import CheckpointError

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.core.checkpoint.tensors import blank, numbers, rows

CALLS = ("open", "write", "fsync", "close", "rename", "mkdir", "unlink", "rmdir")
KILLED, PEER_LOST = 77, 78
TIDY_EVERY = 5
"""After every so many crashes the next save is tried as well."""


class PairRanks:
    """One of at most two processes that talk through a socket."""

    def __init__(self, rank: int, size: int, ends: Sequence[socket.socket]) -> None:
        self.rank, self.size = rank, size
        ends[1 - rank].close()
        self._stream = ends[rank].makefile("rw")

    def gather(self, value: Any) -> list[Any] | None:
        if self.rank == 1:
            self._send(value)
            return None
        return [value, *([self._receive()] if self.size == 2 else [])]

    def broadcast(self, value: Any) -> Any:
        if self.size == 1:
            return value
        if self.rank == 0:
            self._send(value)
            return value
        return self._receive()

    def _send(self, value: Any) -> None:
        self._stream.write(json.dumps(value) + "\n")
        self._stream.flush()

    def _receive(self) -> Any:
        if not (line := self._stream.readline()):
            raise EOFError("the other rank is gone")
        return json.loads(line)


class Shim:
    """Counts the moments around each call, and ends the process at the given one."""

    def __init__(self, folder: Path, crash_at: int | None, power: bool) -> None:
        self.folder, self.crash_at, self.power = folder, crash_at, power
        self.moments = 0
        self.dirty: set[int] = set()
        self.write, self.truncate = os.write, os.truncate
        for name in CALLS:
            setattr(os, name, self.around(name, getattr(os, name)))

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def shimmed(*args: Any, **kwargs: Any) -> Any:
            self.moment()
            if name == "write":
                self.dirty.add(os.fstat(args[0]).st_ino)
                self.moment(lambda: self.write(args[0], args[1][: len(args[1]) // 2]))
            result = call(*args, **kwargs)
            if name == "fsync":
                self.dirty.discard(os.fstat(args[0]).st_ino)
            self.moment()
            return result

        return shimmed

    def moment(self, first: Callable[[], object] = lambda: None) -> None:
        self.moments += 1
        if self.moments != self.crash_at:
            return
        first()
        if self.power:
            for path in self.folder.rglob("*"):
                if path.is_file() and path.stat().st_ino in self.dirty:
                    self.truncate(path, 0)
        os._exit(KILLED)


def save_in_forks(
    folder: Path,
    step: int,
    size: int,
    *,
    victim: int = 0,
    crash_at: int | None = None,
    power: bool = False,
) -> tuple[list[int], int]:
    """Save on ``size`` ranks, of which ``victim`` ends at its moment ``crash_at``.

    Returns:
        Exit status of each rank, and how many moments the victim went through.
    """
    ends = socket.socketpair()
    reading, writing = os.pipe()
    children = []
    for rank in range(size):
        if (child := os.fork()) != 0:
            children.append(child)
            continue
        status = 1
        try:
            ranks = PairRanks(rank, size, ends)
            shim = Shim(folder, crash_at, power) if rank == victim else None
            shards = [rows("model/t", numbers(8, 4, start=step), rank, size)]
            FileStore(folder, ranks=ranks, keep_last=2).save(step, shards, {"step": step})
            if shim:
                shim.write(writing, str(shim.moments).encode())
            status = 0
        except (EOFError, ConnectionError):
            status = PEER_LOST
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    for descriptor in (writing, ends[0].detach(), ends[1].detach()):
        os.close(descriptor)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    with os.fdopen(reading) as pipe:
        return statuses, int(pipe.read() or 0)


def look(folder: Path) -> tuple[list[int], list[str]]:
    """The steps that load with their own numbers, and what is wrong with the others."""
    sound, wrong = [], []
    store = FileStore(folder)
    for step in store.steps():
        shard = blank(rows("model/t", numbers(8, 4), 0, 1))
        try:
            values = store.load(step, [shard])
        except CheckpointError as error:
            wrong.append(f"step {step}: {error}")
            continue
        if values == {"step": step} and torch.equal(shard.tensor, numbers(8, 4, start=step)):
            sound.append(step)
        else:
            wrong.append(f"step {step} holds other numbers")
    return sound, wrong


def enumerate_crashes(
    scratch: Path, before: Sequence[int], step: int, size: int, victim: int, power: bool
) -> dict[str, Any]:
    """Crash a save of ``step`` on top of the steps ``before`` at each of its moments.

    Returns:
        How many crashes there were, how many of them left the new checkpoint, and every fault.
    """
    base = scratch / "base"
    base.mkdir(parents=True)
    for earlier in before:
        save_in_forks(base, earlier, size)
    counting = Path(shutil.copytree(base, scratch / "counting"))
    _, total = save_in_forks(counting, step, size, victim=victim)
    crashes = published = 0
    faults: list[str] = []
    for moment in range(1, total + 1):
        folder = Path(shutil.copytree(base, scratch / f"at-{moment}"))
        statuses, _ = save_in_forks(folder, step, size, victim=victim, crash_at=moment, power=power)
        crashes += statuses[victim] == KILLED
        sound, wrong = look(folder)
        published += step in sound and step not in before
        faults += [f"moment {moment}: {problem}" for problem in wrong]
        if not set(statuses) <= {0, KILLED, PEER_LOST}:
            faults.append(f"moment {moment}: the ranks ended with {statuses}")
        kept = {earlier for earlier in before if earlier != step and earlier >= step - 1}
        if not kept <= set(sound) or (step in before and step not in sound):
            faults.append(f"moment {moment}: only {sound} of {before} are left")
        if moment % TIDY_EVERY == 0:
            statuses, _ = save_in_forks(folder, step + 100, size)
            if any(statuses) or any(path.name.startswith(".") for path in folder.iterdir()):
                faults.append(f"moment {moment}: the next save ended with {statuses} or was untidy")
        shutil.rmtree(folder)
    return {"crashes": crashes, "published": published, "faults": faults}


SCENARIOS = {
    "the first checkpoint": ([], 1, 1, 0, True),
    "the third, and the first goes": ([1, 2], 3, 1, 0, True),
    "the third, with what was not synced": ([1, 2], 3, 1, 0, False),
    "the same step again": ([1, 2], 2, 1, 0, True),
    "rank 0 of two": ([1, 2], 3, 2, 0, True),
    "rank 1 of two": ([1, 2], 3, 2, 1, True),
}
"""Steps before, step to save, ranks, the rank that dies, whether the power goes too."""


def main() -> None:
    root, scenario = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    os.fsync = lambda descriptor: None  # type: ignore[assignment]
    print(json.dumps(enumerate_crashes(root / "scratch", *SCENARIOS[scenario])))


if __name__ == "__main__":
    main()
