"""The protocol: by turns, in fresh processes, and one reason where a peer cannot run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks.protocol import (
    THREADS,
    NotMeasured,
    Settings,
    alternating,
    environment,
    run,
    worker,
)


def test_ours_and_the_peer_are_measured_by_turns() -> None:
    order: list[str] = []

    def measured(name: str) -> int:
        order.append(name)
        return len(order)

    ours, peer = alternating(
        Settings(pairs=3), lambda: measured("ours"), lambda: measured("peer"), "speed"
    )
    assert order == ["ours", "peer"] * 3
    assert (ours, peer) == ([1, 3, 5], [2, 4, 6])


def test_every_process_has_equal_threads_and_no_rank_of_another_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    given = environment()
    assert given["OMP_NUM_THREADS"] == given["MKL_NUM_THREADS"] == str(THREADS)
    assert "RANK" not in given
    assert "WORLD_SIZE" not in given
    assert "PYTHONDONTWRITEBYTECODE" not in given
    assert given["PATH"] == os.environ["PATH"]


def test_a_process_that_fails_gives_its_last_line_as_the_reason() -> None:
    program = "import sys; sys.exit('first line\\nno compiler here')"
    with pytest.raises(NotMeasured, match="exit code 1: no compiler here"):
        run([sys.executable, "-c", program])


def test_a_command_or_a_venv_that_is_missing_is_a_reason_too(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured, match="no-such-command is missing"):
        run([tmp_path / "no-such-command"])
    with pytest.raises(NotMeasured, match="`make peers peers-gpu` builds"):
        worker("end_to_end_worker", python=tmp_path / "python")
