"""Convert a checkpoint or copy its files, once; print seconds and peak memory as JSON::

python -m benchmarks.conversion_worker copy SOURCE
python -m benchmarks.conversion_worker convert SOURCE WORDS...
python -m benchmarks.conversion_worker peak SOURCE WORDS...
python -m benchmarks.conversion_worker keep SOURCE TARGET WORDS...
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

_INTERVAL_SECONDS: Final = 0.002


class AnonymousMemory:
    """Samples this process's anonymous resident memory: without mapped files, which the kernel can
    drop at any time."""

    def __init__(self) -> None:
        self.first = self.peak = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> AnonymousMemory:
        self.first = self.peak = _anonymous_bytes()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(_INTERVAL_SECONDS):
            self.peak = max(self.peak, _anonymous_bytes())


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    raise AssertionError("the kernel states no RssAnon")


def copy(source: Path, target: Path) -> float:
    """Copy and flush all files; return the seconds."""
    begin = time.perf_counter()
    shutil.copytree(source, target)
    for folder, _, names in os.walk(target):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    return time.perf_counter() - begin


def warm(source: Path, scratch: Path) -> None:
    """Copy the files and remove the copy, just before a timed job.

    A virtual machine returns memory that has been free for some seconds to its host, and its next
    use costs several times as much. So both jobs start with the same free memory in the machine.
    """
    copy(source, scratch)
    shutil.rmtree(scratch)


def convert(
    source: Path, target: Path, words: list[str], memory: AnonymousMemory | None = None
) -> dict[str, float]:
    """Convert; return exit code and seconds.

    Args:
        memory: Samples during the conversion, which is slower then: each sample takes the
            interpreter's lock.
    """
    importlib.import_module("torch._dynamo")  # imported by the first fake tensor

    import ascend_run.tools.convert.conversion
    import ascend_run.tools.convert.exporting
    import ascend_run.tools.convert.formats.mp_rank_writing
    import ascend_run.tools.convert.formats.run_checkpoints
    import ascend_run.tools.convert.reporting
    import ascend_run.tools.terminal.byte_bars  # noqa: F401  (imports are not timed)
    from ascend_run.entrypoints.cli import run

    warm(source, target.with_name("scratch"))
    sys.stdout = sys.stderr
    try:
        with memory or contextlib.nullcontext():
            begin = time.perf_counter()
            code = run(["convert", *words, str(source), str(target)])
            seconds = time.perf_counter() - begin
    finally:
        sys.stdout = sys.__stdout__
    return {"exit_code": code, "seconds": seconds}


def peak(source: Path, target: Path, words: list[str]) -> dict[str, float]:
    """Convert; return exit code and bytes."""
    memory = AnonymousMemory()
    found = convert(source, target, words, memory)
    return {"exit_code": found["exit_code"], "peak_bytes": memory.peak - memory.first}


def main(job: str, source: Path, *words: str) -> None:
    with tempfile.TemporaryDirectory(dir=source.parent) as folder:
        target = Path(folder, "target")
        if job == "copy":
            warm(source, target.with_name("scratch"))
            print(json.dumps({"seconds": copy(source, target)}))
        elif job == "convert":
            print(json.dumps(convert(source, target, [*words])))
        elif job == "peak":
            print(json.dumps(peak(source, target, [*words])))
        else:
            print(json.dumps(convert(source, Path(words[0]), [*words[1:]])))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
