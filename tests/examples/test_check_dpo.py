"""The check of examples/dpo.sh and orm.sh accepts runs that learnt preferences, and no others."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[2] / "examples/check_dpo.py"


def check(folder: Path, *runs: Sequence[float], options: Sequence[str] = ()) -> tuple[int, str]:
    for index, shares in enumerate(runs):
        (folder / f"run{index}").mkdir(parents=True)
        lines = [{"event": "start"}, {"step": 1, "rewards/accuracies": 1.0}]
        lines += [{"step": n, "eval_rewards/accuracies": share} for n, share in enumerate(shares)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"run{index}" / "metrics.jsonl").write_text(text)
    folders = [str(folder / f"run{index}") for index in range(len(runs))]
    command = [sys.executable, str(CHECK), *options, *folders]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


def test_runs_that_learnt_pass(tmp_path: Path) -> None:
    assert check(tmp_path, [0.0, 0.7, 0.8], [0.6, 0.5, 0.99]) == (0, "")


@pytest.mark.parametrize(
    ("shares", "reason"),
    [
        ([0.5, 0.9, 0.799], "run1: eval_rewards/accuracies ends at 79.9%, expected at least 80%"),
        ([0.601, 0.9], "run1: eval_rewards/accuracies starts at 60.1%, expected at most 60%"),
        ([math.nan, 0.9], "starts at nan%"),
        ([0.5, math.nan], "ends at nan%"),
        ([0.9], "run1: 1 evaluations"),
    ],
)
def test_a_run_that_did_not_learn_fails_with_the_reason(
    tmp_path: Path, shares: Sequence[float], reason: str
) -> None:
    code, errors = check(tmp_path, [0.5, 0.9], shares)
    assert code == 1
    assert reason in errors


def test_another_least_accuracy_can_be_asked_for(tmp_path: Path) -> None:
    assert check(tmp_path / "passes", [0.5, 0.86], options=("--least", "85")) == (0, "")
    code, errors = check(tmp_path / "fails", [0.5, 0.84], options=("--least", "85"))
    assert code == 1
    assert "ends at 84.0%, expected at least 85%" in errors
