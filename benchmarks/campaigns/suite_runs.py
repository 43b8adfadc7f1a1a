"""Processes of pytest for the campaign ``suite``."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from .campaign import FOLDER, PASSED, Outcome
from .suite_reports import VARIABLE

ROOT: Final = FOLDER.parents[1]
MARK: Final = "pytest.mark.exhaustive"
START_SECONDS: Final = 600.0
"""For the imports of every test file, on a busy machine."""
CASE_SECONDS: Final = 150.0
"""A little more than pytest's own limit for a test."""
WORDS: Final = ("-q", "-p", "no:cacheprovider", "-p", f"{__package__}.suite_reports")

_POLL_SECONDS: Final = 0.5
_NOTHING_RAN: Final = frozenset({2, 3, 4, 5})
"""Exit codes of pytest: interrupted, internal error, usage, no tests."""


def marked_files(root: Path = ROOT) -> list[str]:
    """Return the test files with a marked test."""
    found = sorted((root / "tests").rglob("test_*.py"))
    texts = ((path, path.read_text(encoding="utf-8")) for path in found)
    return [str(path.relative_to(root)) for path, text in texts if MARK in text]


@attrs.frozen
class Session:
    """A process of pytest that writes what it does to a file."""

    folder: Path
    root: Path = ROOT

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, VARIABLE: str(self._reports), "OMP_NUM_THREADS": "1"}
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "pytest", *WORDS, *words],
                cwd=self.root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def lines(self) -> list[dict[str, Any]]:
        """Return what has been written; half a line is left out."""
        text = self._reports.read_text(encoding="utf-8") if self._reports.exists() else ""
        whole, _, _ = text.rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    def log_tail(self) -> str:
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")[-2000:]

    @property
    def _reports(self) -> Path:
        return self.folder / "reports.jsonl"


def collected(root: Path = ROOT) -> Mapping[str, Sequence[str]]:
    """Return the ids of the marked files' tests: ``kept`` by the suite and ``left`` to the
    campaign.

    Raises:
        RuntimeError: pytest cannot collect them.
    """
    with tempfile.TemporaryDirectory(prefix="ascend-run-suite-") as folder:
        session = Session(Path(folder), root)
        process = session.start("--collect-only", *marked_files(root))
        try:
            code = process.wait(START_SECONDS)
        finally:
            process.kill()
            process.wait()
        if code:
            raise RuntimeError(f"pytest cannot collect the tests:\n{session.log_tail()}")
        (found,) = session.lines()
        return found


def outcomes(
    cases: Sequence[str], workers: int, root: Path = ROOT
) -> Iterator[tuple[str, Outcome]]:
    """Yield each case with its outcome; those that fail come last, after another attempt."""
    failed: dict[str, Outcome] = {}
    for case, outcome in _attempted(cases, workers, root):
        if outcome["verdict"] == PASSED:
            yield case, outcome
        else:
            failed[case] = outcome
    for case, outcome in _attempted([*failed], 1, root):
        again = outcome if outcome["verdict"] == PASSED else failed[case]
        yield case, {**again, "attempts": 2}


def _attempted(cases: Sequence[str], workers: int, root: Path) -> Iterator[tuple[str, Outcome]]:
    """Yield each case with its outcome at one attempt."""
    results: queue.SimpleQueue[tuple[str, Outcome] | Exception] = queue.SimpleQueue()
    stop = threading.Event()

    def work(share: Sequence[str]) -> None:
        try:
            _run_share(share, root, results.put, stop)
        except Exception as error:
            results.put(error)

    threads = [threading.Thread(target=work, args=(share,)) for share in _shares(cases, workers)]
    for thread in threads:
        thread.start()
    try:
        for _ in cases:
            found = results.get()
            if isinstance(found, Exception):
                raise found
            yield found
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _shares(cases: Sequence[str], workers: int) -> list[list[str]]:
    """Split the cases evenly, those of a file together; in the order of files, as in the suite, for
    what a run leaves in a process, such as compiled graphs, can be seen by a later test."""
    files: dict[str, list[str]] = {}
    for case in cases:
        files.setdefault(case.partition("::")[0], []).append(case)
    shares: list[list[str]] = [[] for _ in range(workers)]
    for of_file in sorted(files.values(), key=len, reverse=True):
        min(shares, key=len).extend(of_file)
    return [sorted(share) for share in shares if share]


def _run_share(share: Sequence[str], root: Path, put: Any, stop: threading.Event) -> None:
    """Run cases in one process after another until each has an outcome."""
    left = [*share]
    while left and not stop.is_set():
        with tempfile.TemporaryDirectory(prefix="ascend-run-suite-") as folder:
            session = Session(Path(folder), root)
            code = _run(session, left, put, stop)
            lines = session.lines()
            log = session.log_tail()
        done = {line["case"] for line in lines if "case" in line}
        left = [case for case in left if case not in done]
        running = [line["begins"] for line in lines if "begins" in line][-1:]
        lost = left if code in _NOTHING_RAN or not running else [c for c in left if c in running]
        for case in lost:
            why = f"pytest ended with exit code {code} before its outcome was known"
            put((case, {"verdict": "error", "why": f"{why}\n{log}"}))
        left = [case for case in left if case not in lost]


def _run(session: Session, cases: Sequence[str], put: Any, stop: threading.Event) -> int:
    """Put each outcome; return pytest's exit code."""
    chosen = session.folder / "cases.json"
    chosen.write_text(json.dumps(cases), encoding="utf-8")
    files = dict.fromkeys(case.partition("::")[0] for case in cases)
    process = session.start(f"--cases={chosen}", *files)
    given, polls = 0, int((START_SECONDS + CASE_SECONDS * len(cases)) / _POLL_SECONDS)
    try:
        for _ in range(polls):
            code = process.poll()
            lines = session.lines()
            for line in lines[given:]:
                if "case" in line:
                    put((line["case"], line["outcome"]))
            given = len(lines)
            if code is not None:
                return code
            if stop.wait(_POLL_SECONDS):
                break
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()
