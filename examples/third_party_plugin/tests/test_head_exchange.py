"""The plugin as its users meet it: listed, refused, at parity. Needs it installed."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest

from ascend_run.testing.parity import Parity

LAYERS, MICRO_BATCHES = 2, 4
MESSAGES = 9
"""Of one layer and micro-batch: q, k, v, out, log-sum-exp; and four gradients."""


def command(*words: str) -> tuple[int, str, str, list[str]]:
    """Exit code, output, errors and imported modules of an ascend-run command."""
    program = (
        "import json, sys\n"
        "from ascend_run.entrypoints.cli import run\n"
        "code = run(sys.argv[1:])\n"
        "print()\n"
        "print(json.dumps([code, sorted(sys.modules)]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60
    )
    *output, last = done.stdout.splitlines()
    code, modules = json.loads(last)
    return code, "\n".join(output), done.stderr, modules


def test_it_is_listed_by_name_and_version_and_its_code_has_not_run() -> None:
    code, output, _, modules = command("plugins", "--json")
    (row,) = (row for row in json.loads(output) if row["name"] == "head-exchange")
    assert code == 0
    assert row["distribution"] == "ascend-run-head-exchange"
    assert row["version"] == version("ascend-run-head-exchange")
    assert "ascend_run_head_exchange" not in modules


def test_showing_it_imports_it_but_no_torch() -> None:
    code, output, _, modules = command("plugins", "show", "head-exchange")
    assert code == 0
    assert "context-parallel" in output
    assert "ascend_run_head_exchange" in modules
    assert "torch" not in modules


RUN = (
    "plan",
    "data.train=any",
    "model.num_layers=1",
    "model.hidden_size=40",
    "model.num_attention_heads=10",
    "model.vocab_size=90",
)


def test_what_it_cannot_split_is_refused_with_all_that_is_wrong() -> None:
    sizes = ("run.nproc=4", "parallel.context_parallel_size=4", "data.seq_length=62")
    code, _, errors, _ = command(*RUN, *sizes, "--enable", "head-exchange")
    assert code == 2
    assert "10 heads" in errors
    assert "data.seq_length=62 cannot be split over parallel.context_parallel_size=4" in errors


def test_it_is_refused_beside_ulysses_since_both_claim_the_exchange() -> None:
    code, _, errors, _ = command(*RUN, "--enable", "head-exchange,ulysses")
    assert code == 2
    assert "'head-exchange' and 'ulysses' both claim 'context-parallel'" in errors


@pytest.mark.parametrize("size", [2, 4])
def test_it_keeps_every_gradient_and_sends_each_tensor_by_itself(parity: Parity, size: int) -> None:
    for outcome in parity("head-exchange", layout={"cp": size}):
        assert outcome.collectives["alltoall_"] == LAYERS * MICRO_BATCHES * MESSAGES


@pytest.mark.parametrize("options", [{"model": "moe"}, {"beside": ["swap-attention"]}], ids=str)
def test_it_goes_with_experts_and_with_features_of_others(
    parity: Parity, options: dict[str, Any]
) -> None:
    parity("head-exchange", layout={"cp": 2}, **options)
