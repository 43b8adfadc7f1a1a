"""A save that dies at any moment leaves the earlier checkpoints or the new one, never a ruin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from . import crash_worker

# Up to 80 moments, each with a process or two of its own; most of it is the kernel's forking.
pytestmark = pytest.mark.timeout(300)


def result_of(scenario: str, folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, crash_worker.__file__, str(folder), scenario],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.exhaustive(by=lambda scenario: ())
@pytest.mark.parametrize("scenario", crash_worker.SCENARIOS)
def test_every_crash_point_leaves_only_checkpoints_that_load(scenario: str, tmp_path: Path) -> None:
    """On one rank they fall on both sides of the rename that publishes."""
    found = result_of(scenario, tmp_path)
    assert found["faults"] == []
    # Rank 1 writes a file and reads one; rank 0 also makes, publishes and prunes folders.
    assert found["crashes"] >= (15 if scenario == "rank 1 of two" else 40)
    before, step, size, *_ = crash_worker.SCENARIOS[scenario]
    if size == 1 and step not in before:
        assert 0 < found["published"] < found["crashes"]
