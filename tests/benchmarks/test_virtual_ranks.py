"""The row of virtual ranks: its arithmetic and its attention here; its figure needs a GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from benchmarks import virtual_ranks, virtual_ranks_worker
from benchmarks.protocol import NotMeasured, Settings
from benchmarks.rows import Row


def row_of(monkeypatch: pytest.MonkeyPatch, apart: float) -> Row:
    """The ranks take 5 % longer."""

    def result(module: str, *words: str) -> dict[str, Any]:
        assert module == "virtual_ranks_worker"
        seconds = 1.05 if "ranks" in words else 1.0
        return {"seconds": [seconds], "apart": apart, "device": "NVIDIA H100"}

    monkeypatch.setattr(virtual_ranks, "worker", result)
    monkeypatch.setattr(virtual_ranks, "require_gpu", lambda: None)
    (benchmark,) = virtual_ranks.benchmarks()
    return benchmark.measure(Settings(pairs=2))


def test_the_times_of_both_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    row = row_of(monkeypatch, 1e-3)
    assert row.met
    assert row.device == "NVIDIA H100"
    assert (row.ours, row.peer) == (1050.0, 1000.0)
    assert row.ratio == pytest.approx(1 / 1.05, abs=1e-3)


@pytest.mark.parametrize("apart", [0.1, math.nan])
def test_another_attention_than_that_of_one_call_makes_the_row_fail(
    monkeypatch: pytest.MonkeyPatch, apart: float
) -> None:
    row = row_of(monkeypatch, apart)
    assert not row.met
    assert row.note.startswith("FAILED: not the attention of one call")


def test_without_a_gpu_it_says_that_it_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu_step._gpu", lambda: ("", "needs a GPU"))
    (benchmark,) = virtual_ranks.benchmarks()
    with pytest.raises(NotMeasured, match="needs a GPU; unverified"):
        benchmark.measure(Settings.quick())


@pytest.mark.parametrize("form", virtual_ranks_worker.FORMS)
def test_eight_ranks_on_one_device_attend_as_one_call_does(form: str) -> None:
    tensors = virtual_ranks_worker.inputs("tiny", "cpu", torch.float64)
    result = virtual_ranks_worker.measure(form, tensors, ranks=8, warmup=0, steps=2)
    assert result["apart"] <= 1e-12
    assert len(result["seconds"]) == 2
    assert result["device"] is None


def test_every_rank_makes_a_call_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A causal ring of P ranks: P blocks each, forward and backward."""
    kernel: Any = virtual_ranks_worker.platform_kernel("cpu")
    calls: list[str] = []
    for name in ("forward", "backward"):
        plain = getattr(kernel, name)
        monkeypatch.setattr(
            kernel, name, lambda *a, plain=plain, name=name: (calls.append(name), plain(*a))[1]
        )
    tensors = virtual_ranks_worker.inputs("tiny", "cpu", torch.float64)
    virtual_ranks_worker.VirtualRanks(kernel, tensors, 8).step()
    assert calls == ["forward"] * 64 + ["backward"] * 64
