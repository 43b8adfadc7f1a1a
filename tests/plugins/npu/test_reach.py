"""Every line of platform npu runs in its own suite, which compares what it computes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import ascend_run
from tests.support.reach import ROOT, lines_of_functions, lines_that_ran, traced

PACKAGE = Path(ascend_run.__file__).parent / "plugins/npu"
SUITE = Path(__file__).parent
LEFT_OUT = (
    "test_planted_mistakes.py",  # they would count as proofs
    *("test_reach.py", "test_releases.py", "test_probe.py"),  # they call nothing
    *("test_parity.py", "test_device_path.py"),  # whole runs, of the same lines
)
UNREACHED: Mapping[str, str] = {}
"""A line's text -> why no test can run it."""


def test_every_line_runs_in_the_suite(tmp_path: Path) -> None:
    files = sorted(path for path in SUITE.glob("test_*.py") if path.name not in LEFT_OUT)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
         "-k", "not any_shape_and_mask", *map(str, files)],
        env={**traced(PACKAGE, tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    ran = lines_that_ran(tmp_path)
    missed = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if "proof" in path.relative_to(PACKAGE).parts:  # no code path of a run
            continue
        lines = path.read_text(encoding="utf-8").splitlines()
        for number in sorted(lines_of_functions(path) - {n for p, n in ran if p == path}):
            missed[f"{path.relative_to(PACKAGE)}:{number}"] = lines[number - 1].strip()
    new = {place: text for place, text in missed.items() if text not in UNREACHED}
    assert new == {}, "lines that no test of the suite runs"
    assert {*missed.values()} == {*UNREACHED}, "a reason for what is reached"
