"""The rows of experts on a GPU: their forms on the CPU here; their figures need a GPU."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from benchmarks import gpu_experts, gpu_experts_worker
from benchmarks.gpu_experts_worker import FORMS, ROUTINGS, Problem, apart, counts_of
from benchmarks.protocol import NotMeasured, Settings
from benchmarks.rows import Row


def row_of(monkeypatch: pytest.MonkeyPatch, apart: float) -> Row:
    """A loop takes three times as long."""

    def result(module: str, *words: str) -> dict[str, Any]:
        assert module == "gpu_experts_worker"
        seconds = {"ours": 1.0, "loop": 3.0, "products": 0.96}[words[-1]]
        return {"seconds": seconds, "apart": apart, "device": "NVIDIA H100"}

    monkeypatch.setattr(gpu_experts, "worker", result)
    monkeypatch.setattr(gpu_experts, "require_gpu", lambda: None)
    found = {b.name: b for b in gpu_experts.benchmarks()}
    row = found["experts on a GPU, 64, skewed, bf16 vs a loop over experts"]
    return row.measure(Settings(pairs=2))


def test_a_row_compares_the_times_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    row = row_of(monkeypatch, 4e-3)
    assert row.met
    assert (row.ours, row.peer, row.ratio, row.goal) == (1000.0, 3000.0, 3.0, ">= 2.6 x")


@pytest.mark.parametrize("value", [0.1, math.nan])
def test_other_results_than_the_loops_fail(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    row = row_of(monkeypatch, value)
    assert not row.met
    assert row.note.startswith("FAILED: not what the loop computes")


def test_goals_are_those_of_experts_and_peer() -> None:
    goals = {b.name.partition("GPU, ")[2]: b.goal for b in gpu_experts.benchmarks()}
    assert len(goals) == 12
    assert goals["8, balanced, bf16 vs a loop over experts"] == ">= 1.4 x"
    assert goals["128, balanced, bf16 vs a loop over experts"] == ">= 2.6 x"
    assert goals["128, skewed, bf16 vs its grouped GEMMs alone"] == ">= 0.95 x"


def test_without_a_gpu_experts_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu_step._gpu", lambda: ("", "needs a GPU"))
    with pytest.raises(NotMeasured, match="needs a GPU"):
        gpu_experts.benchmarks()[0].measure(Settings.quick())


@pytest.mark.parametrize("experts", gpu_experts.EXPERTS)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_token_has_an_expert(routing: str, experts: int) -> None:
    counts = counts_of(32768, experts, routing)
    assert sum(counts) == 32768
    assert min(counts) >= 0
    assert (counts[-1] == 0) == (routing == "skewed")
    assert counts[0] >= 8192 or routing == "balanced"


@pytest.mark.parametrize("routing", ROUTINGS)
def test_ours_computes_what_the_loop_does(routing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem("tiny", 8, routing, "cpu")
    assert apart(problem) <= 1e-2
    with torch.no_grad():
        problem.fc2[0] *= 1.1
    found = gpu_experts_worker.ours(problem)()
    with torch.no_grad():
        problem.fc2[0] /= 1.1
    monkeypatch.setitem(vars(gpu_experts_worker), "ours", lambda problem: lambda: found)
    assert apart(problem) > 1e-2


@pytest.mark.parametrize("form", FORMS)
def test_the_worker_prints_its_seconds(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--experts 8 --routing skewed --device cpu --size tiny --steps 1 --warmup 0"
    gpu_experts_worker.main(["--form", form, *words.split()])
    result = json.loads(capsys.readouterr().out)
    assert result["seconds"] > 0
    assert ("apart" in result) == (form == "ours")
