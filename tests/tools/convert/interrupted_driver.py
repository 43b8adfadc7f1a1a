"""Interrupts conversions, at random writes and at chosen points: ``python -m ... ROOT SEED``.

Each conversion is a forked process. A profiler counts its calls of the operating system that write,
in the thread that writes tensors and in the main one, and sends a signal before one of them; so a
fault is below all code of the package.
"""

from __future__ import annotations

import io
import json
import os
import random
import resource
import signal
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Imported before the forks, as is what a first conversion of each format imports.
import ascend_run.tools.convert.exporting
import ascend_run.tools.convert.formats.mp_rank_writing
import ascend_run.tools.convert.formats.run_checkpoints
import ascend_run.tools.convert.formats.torch_dist
import ascend_run.tools.convert.reporting  # noqa: F401
from ascend_run.entrypoints.cli import run

FORMATS = ("mp-rank", "hf", "ascend-run", "torch-dist")
MAIN, WRITER = "MainThread", "convert-write"
POINTS = {
    "before the first write": ("hf", WRITER, "write", 0.0),
    "between tensors": ("hf", WRITER, "write", 0.5),
    "before the last write": ("hf", WRITER, "write", 1.0),
    "before the first fsync": ("hf", MAIN, "fsync", 0.0),
    "before the folder is renamed": ("hf", MAIN, "rename|replace", 1.0),
    "before the first shard": ("mp-rank", WRITER, "write", 0.0),
    "between shards": ("mp-rank", WRITER, "write", 0.5),
}
"""Name -> format, thread, calls of which one is killed, and which: 0 the first, 1 the last."""
_WRITES = frozenset({"write", "posix_fallocate", "fsync", "rename", "replace", "mkdir", "chmod"})
_OWNERS = (types.ModuleType, io.FileIO, io.BufferedWriter, io.BufferedRandom, io.TextIOWrapper)


def in_child(job: Callable[[], int], messages: Path) -> int:
    """Run a job in a forked process; return its wait status."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            descriptor = os.open(messages, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(descriptor, 2)
            os.dup2(descriptor, 1)
            code = job()
        except SystemExit as done:
            code = int(done.code or 0)
        finally:
            sys.setprofile(None)
            sys.stderr.flush()
            sys.stdout.flush()
            os._exit(code)
    return os.waitpid(child, 0)[1]


class Writes:
    """Records the writes of every thread; sends a signal before one of them.

    Args:
        at: Which write of a thread, from 1.
        thread: Start of the thread's name.
        calls: Names of the calls that count.
    """

    def __init__(
        self, at: int, number: int, thread: str = MAIN, calls: frozenset[str] = _WRITES
    ) -> None:
        self.at, self.number, self.thread, self.calls = at, number, thread, calls
        self.count = 0
        self.made: list[tuple[str, str]] = []
        """Thread and call of each."""

    def __call__(self, frame: object, event: str, argument: Any) -> None:
        if event != "c_call" or argument.__name__ not in _WRITES:
            return
        if not isinstance(argument.__self__, _OWNERS):  # such as str.replace
            return
        thread, call = threading.current_thread().name, argument.__name__
        self.made.append((thread, call))
        if thread.startswith(self.thread) and call in self.calls:
            self.count += 1
            if self.count == self.at:
                os.kill(os.getpid(), self.number)


def num_calls(made: list[tuple[str, str]], thread: str, calls: frozenset[str]) -> int:
    return sum(name.startswith(thread) and call in calls for name, call in made)


def converted(words: list[str], writes: Writes | None = None, record: Path | None = None) -> int:
    writes = writes or Writes(0, 0)
    threading.setprofile(writes)  # of threads that start from now on
    sys.setprofile(writes)
    try:
        return run(["convert", *words])
    finally:
        sys.setprofile(None)
        if record is not None:
            record.write_text(json.dumps(writes.made))


def converted_until(words: list[str], size: int) -> int:
    """Convert until a file has a size: the write that crosses it is cut there, and kills."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    return run(["convert", *words])


def kill_at_points(root: Path) -> list[dict[str, Any]]:
    """Kill at each of ``POINTS``, and in the middle of a block; return what is left of each."""
    results = []
    for point, (form, thread, call, share) in POINTS.items():
        calls = frozenset(call.split("|"))
        total = num_calls(json.loads((root / f"{form}-made").read_text()), thread, calls)
        target = root / point / "new" / "target"
        writes = Writes(1 + int(share * (total - 1)), signal.SIGKILL, thread, calls)
        status = in_child(
            lambda f=form, t=target, w=writes: converted(_words(root, f, t), w), root / "messages"
        )
        results.append({"point": point, "status": status, "left": _files(target.parent)})
    size = (root / "hf-whole" / "model.safetensors").stat().st_size // 2
    target = root / "half a block" / "new" / "target"
    status = in_child(lambda: converted_until(_words(root, "hf", target), size), root / "messages")
    left = _files(target.parent)
    return [*results, {"point": "half a block", "status": status, "left": left, "size": size}]


def _words(root: Path, form: str, target: Path) -> list[str]:
    layout = ["--tp", "2"] if form == "mp-rank" else []
    return ["--to", form, *layout, str(root / "source"), str(target)]


def _files(folder: Path) -> dict[str, int]:
    """Return the sizes of all files, by path."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def main(root: Path, seed: int) -> None:
    draw = random.Random(seed)
    messages = root / "messages"
    results = []
    for form in FORMATS:  # imports what a conversion needs, or every fork would
        assert run(["convert", *_words(root, form, root / f"{form}-first")]) == 0
    for form in FORMATS:
        whole, made = _words(root, form, root / f"{form}-whole"), root / f"{form}-made"
        assert in_child(lambda w=whole, m=made: converted(w, record=m), messages) == 0
        total = num_calls(json.loads(made.read_text()), MAIN, _WRITES)
        softly = (signal.SIGTERM, signal.SIGINT)[FORMATS.index(form) % 2]
        for number in (signal.SIGKILL, softly):
            folder = root / f"{form}-{number.name}-{len(results)}" / "new"
            target, at = folder / "target", draw.randint(4, total - 5)
            ask = _words(root, form, target)
            writes = Writes(at, number)
            status = in_child(lambda a=ask, w=writes: converted(a, w), messages)
            parent_left = folder.exists()
            left = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
            text = messages.read_text()
            again = 0 if target.exists() else in_child(lambda a=ask: converted(a), messages)
            results.append(
                {
                    "format": form,
                    "signal": number.name,
                    "at": f"{at} of {total}",
                    "status": status,
                    "left": left,
                    "parent_left": parent_left,
                    "messages": text,
                    "again": again,
                    "at_end": sorted(path.name for path in folder.iterdir()),
                    "target": str(target),
                }
            )
    print(json.dumps({"random": results, "chosen": kill_at_points(root)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
