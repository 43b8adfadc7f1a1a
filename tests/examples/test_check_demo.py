"""The demo's own check tells a run that learnt from one that did not."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[2] / "examples/check_demo.py"
EVEN = math.log(4096)


def check(folder: Path, losses: Sequence[float]) -> tuple[int, str]:
    (folder / "config.toml").write_text("[model]\nvocab_size = 4096\n")
    lines = [{"event": "start"}, {"step": 1, "loss": 1.0}]
    lines += [{"step": step, "eval_loss": loss} for step, loss in enumerate(losses)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, str(CHECK), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


@pytest.mark.parametrize("start", [1.0, 1.029, 0.971])
def test_a_run_that_learnt_passes(tmp_path: Path, start: float) -> None:
    assert check(tmp_path, [EVEN * start, 9.0, EVEN * start * 0.559]) == (0, "")


@pytest.mark.parametrize(
    ("losses", "reason"),
    [
        ([EVEN * 1.031, EVEN / 2], "within 3% of ln 4096 = 8.3178"),
        ([EVEN * 0.969, EVEN / 2], "starts at 8.0599"),
        ([EVEN, EVEN * 0.56], "ends at 56.0% of its start, expected below 56%"),
        ([EVEN, math.nan], "ends at nan%"),
        ([math.nan, 1.0], "starts at nan"),
        ([EVEN], "1 evaluations"),
    ],
)
def test_a_run_that_did_not_learn_fails_with_the_reason(
    tmp_path: Path, losses: Sequence[float], reason: str
) -> None:
    code, errors = check(tmp_path, losses)
    assert code == 1
    assert reason in errors
