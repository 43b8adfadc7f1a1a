"""Runs from the command line, in separate processes: variables are set in time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_distributions import make_distribution, plugin_source
from tests.support.tokens import write_tokens

TELLS = """
    @hookimpl
    def ascend_after_step(self, context):
        import os
        from pathlib import Path

        told = {"hash": hash("a text"), "seed": os.environ.get("PYTHONHASHSEED"),
                "threads": os.environ.get("MKL_DYNAMIC")}
        folder = Path(context.config.run.output_dir)
        (folder / f"told-{context.layout.rank}").write_text(repr(told))
"""


def run(folder: Path, name: str, *words: str) -> tuple[list[Any], list[str]]:
    """Return losses of the steps, and what each rank reported of its process."""
    site = make_distribution(
        folder / f"site-{name}",
        "ascend-run-teller",
        {"ascend_run.plugins": {"teller": "teller_plugin:Plugin"}},
        {"teller_plugin.py": plugin_source("teller") + TELLS},
    )
    values = {
        "data.train": folder / "tokens",
        "run.output_dir": folder / name,
        "model.num_layers": 1,
        "model.hidden_size": 16,
        "model.num_attention_heads": 2,
        "model.vocab_size": 90,
        "data.seq_length": 16,
        "train.train_iters": 3,
        "train.global_batch_size": 2,
        "train.precision": "fp32",
    }
    process = subprocess.run(
        [
            *(sys.executable, "-m", "ascend_run", *words),
            *(f"{key}={value}" for key, value in values.items()),
        ],
        cwd=folder,
        env={
            **{k: v for k, v in os.environ.items() if k not in ("PYTHONHASHSEED", "RANK")},
            "TORCHDYNAMO_DISABLE": "1",  # nothing compiles, and the compiler is slow to import
            "PYTHONPATH": str(site),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    losses = [reading["loss"] for line in lines if "loss" in (reading := json.loads(line))]
    files = sorted((folder / name).glob("told-*"))
    return losses, [path.read_text() for path in files]


# A run takes ten seconds; losses of two runs are those of ``test_repeated.py`` too.
@pytest.mark.exhaustive(by=lambda runs: [runs] if runs == 1 else [])
@pytest.mark.parametrize("runs", [1, 2])
def test_hashes_and_losses_are_the_same_in_all_runs_of_one_command(
    tmp_path: Path, runs: int
) -> None:
    """Hashes are those of any interpreter with this seed."""
    write_tokens(tmp_path)
    words = ("--enable", "deterministic,teller", "--nproc", "2", "run.seed=11")
    hashed = subprocess.run(
        [sys.executable, "-c", "print(hash('a text'))"],
        env={**os.environ, "PYTHONHASHSEED": "11"},
        capture_output=True,
        text=True,
        check=True,
    )
    expected = repr({"hash": int(hashed.stdout), "seed": "11", "threads": "FALSE"})
    losses = []
    for number in range(runs):
        found, of_ranks = run(tmp_path, f"run-{number}", *words)
        assert of_ranks == [expected] * 2
        assert len(found) == 3
        losses.append(found)
    assert losses == [losses[0]] * runs
