"""A save that dies at any moment leaves the earlier checkpoints or the new one, never a ruin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from . import crash_worker

# Some 350 moments, each with a process or two of its own; most of it is the kernel's forking.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, crash_worker.__file__, str(tmp_path_factory.mktemp("crashes"))],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("scenario", crash_worker.SCENARIOS)
def test_every_crash_point_leaves_only_checkpoints_that_load(
    results: dict[str, Any], scenario: str
) -> None:
    found = results[scenario]
    assert found["faults"] == []
    # Rank 1 writes a file and reads one; rank 0 also makes, publishes and prunes folders.
    assert found["crashes"] >= (15 if scenario == "rank 1 of two" else 40)


@pytest.mark.parametrize("scenario", ["the first checkpoint", "the third, and the first goes"])
def test_crashes_fall_on_both_sides_of_the_rename_that_publishes(
    results: dict[str, Any], scenario: str
) -> None:
    assert 0 < results[scenario]["published"] < results[scenario]["crashes"]
