"""Interrupts conversions at random writes. Run as a script: ``python -m ... ROOT SEED``.

Each conversion is a forked process. A profiler counts its calls of the operating system that write,
and sends a signal before one of them; so a fault is below all code of the package.
"""

from __future__ import annotations

import io
import json
import os
import random
import signal
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Imported once, before the forks.
import ascend_run.tools.convert.exporting
import ascend_run.tools.convert.formats.mp_rank_writing
import ascend_run.tools.convert.formats.run_checkpoints
import ascend_run.tools.convert.formats.torch_dist
import ascend_run.tools.convert.reporting  # noqa: F401
from ascend_run.entrypoints.cli import run

FORMATS = ("mp-rank", "hf", "ascend-run", "torch-dist")
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
    """Counts the writes of this thread; sends a signal before one of them."""

    def __init__(self, at: int, number: int) -> None:
        self.at, self.number, self.count = at, number, 0

    def __call__(self, frame: object, event: str, argument: Any) -> None:
        if event == "c_call" and argument.__name__ in _WRITES:
            if not isinstance(argument.__self__, _OWNERS):  # such as str.replace
                return
            self.count += 1
            if self.count == self.at:
                os.kill(os.getpid(), self.number)


def converted(words: list[str], at: int = 0, number: int = 0, counted: Path | None = None) -> int:
    writes = Writes(at, number)
    sys.setprofile(writes)
    try:
        return run(["convert", *words])
    finally:
        sys.setprofile(None)
        if counted is not None:
            counted.write_text(str(writes.count))


def main(root: Path, seed: int) -> None:
    draw = random.Random(seed)
    messages, count_file, source = root / "messages", root / "count", str(root / "source")
    results = []
    for form in FORMATS:
        words = ["--to", form, *(["--tp", "2"] if form == "mp-rank" else []), source]
        whole = [*words, str(root / f"{form}-whole")]
        assert in_child(lambda w=whole: converted(w, counted=count_file), messages) == 0
        total = int(count_file.read_text())
        softly = (signal.SIGTERM, signal.SIGINT)[FORMATS.index(form) % 2]
        for number in (signal.SIGKILL, softly):
            folder = root / f"{form}-{number.name}-{len(results)}" / "new"
            target, at = folder / "target", draw.randint(4, total - 5)
            ask = [*words, str(target)]
            status = in_child(lambda a=ask, k=at, n=number: converted(a, k, n), messages)
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
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
