"""The rows of fused operators: their words and arithmetic here; their figures need a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import end_to_end, gpu_operators, operator_worker
from benchmarks.protocol import GPU_PEERS_PYTHON, NotMeasured, Settings

SIZES = operator_worker.SIZES["tiny"]


def test_faster_than_the_peer_is_above_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[tuple[str, ...], Any]] = []

    def result(module: str, *words: str, python: Any = None, **_: Any) -> dict[str, Any]:
        calls.append((words, python))
        ours = "ours" in words or "ascend-run-fused" in words
        return {
            "seconds": 1e-4 if ours else 2e-4,
            "tokens_per_second": 110.0 if ours else 100.0,
            "losses": [10.4] * 4,
            "peak_bytes": 2**30,
            "device": "NVIDIA H200",
        }

    for module in (gpu_operators, end_to_end):
        monkeypatch.setattr(module, "worker", result)
    monkeypatch.setattr(gpu_operators, "require_gpu", lambda: None)
    rows = [b.measure(Settings(pairs=1)) for b in gpu_operators.benchmarks()]
    assert [row.ratio for row in rows] == [2.0] * 6 + [1.1]
    assert rows[0].ours == 100.0  # microseconds
    assert all(row.met for row in rows)
    pythons = {python for words, python in calls if "--operator" in words}
    assert pythons == {GPU_PEERS_PYTHON}
    assert {words[1] for words, _ in calls if "--system" in words} == {
        "ascend-run-fused",
        "ascend-run",
    }


def test_without_a_gpu_each_row_says_that_it_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("benchmarks.gpu_step._gpu", lambda: ("", "needs a GPU"))
    for benchmark in gpu_operators.benchmarks():
        with pytest.raises(NotMeasured, match="needs a GPU; unverified"):
            benchmark.measure(Settings.quick())


@pytest.mark.parametrize("operator", operator_worker.OPERATORS)
def test_the_eager_form_runs_forward_and_backward(operator: str) -> None:
    leaves = operator_worker.leaves_of(operator, "eager", SIZES, "cpu")
    call = operator_worker.call_of(operator, "eager", SIZES, leaves)
    result = operator_worker.measure(call, leaves, warmup=0, steps=1)
    assert result["seconds"] > 0
    assert all(leaf.grad is not None for leaf in leaves)


def test_what_liger_is_given_lies_as_its_own_users_have_it() -> None:
    gate, up = operator_worker.leaves_of("swiglu", "liger", SIZES, "cpu")
    (joined,) = operator_worker.leaves_of("swiglu", "ours", SIZES, "cpu")
    assert gate.shape == up.shape == (*joined.shape[:2], joined.shape[2] // 2)
    cos, _ = operator_worker.tables(SIZES, torch.empty(1))
    assert cos.shape == (SIZES["S"], SIZES["D"])
