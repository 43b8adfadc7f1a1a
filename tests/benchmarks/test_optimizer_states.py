"""The rows of an optimizer's bytes: what is counted, and which results count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from ascend_run.testing.pool import GlooPool
from benchmarks import llama, optimizer_states
from benchmarks.optimizer_states_rank import live_bytes
from benchmarks.optimizer_states_worker import measured as measured_on_ranks
from benchmarks.protocol import Settings
from benchmarks.rows import Row

NUMEL = 1000


def measured(monkeypatch: pytest.MonkeyPatch, trained: Mapping[str, float]) -> list[Row]:
    """The rows, if each rank holds so many bytes per parameter after training."""

    def worker(module: str, *words: str) -> dict[str, Any]:
        assert module == "optimizer_states_worker"
        ranks, (_, *enable) = int(words[1]), words[2:]
        held = NUMEL * (2 + (trained["".join(enable)] - 2) / ranks)
        return {"parameters": NUMEL, "ranks": [{"built": 6 * NUMEL, "trained": held}] * ranks}

    monkeypatch.setattr(optimizer_states, "worker", worker)
    rows = [benchmark.measure(Settings()) for benchmark in optimizer_states.benchmarks()]
    assert [row.goal for row in rows] == [one.goal for one in optimizer_states.benchmarks()]
    return rows


@pytest.mark.parametrize(("kept", "met"), [(12, True), (12.01, False), (11.99, False), (14, False)])
def test_two_bytes_per_parameter_are_saved_exactly(
    monkeypatch: pytest.MonkeyPatch, kept: float, met: bool
) -> None:
    held = {"": 14, "reuse-fp32-param": kept, "low-precision-optimizer": 8.0}
    assert measured(monkeypatch, held)[0].met is met


@pytest.mark.parametrize(("moments", "met"), [(2.04, True), (2.06, False), (8, False)])
def test_a_quarter_of_the_moments_is_held(
    monkeypatch: pytest.MonkeyPatch, moments: float, met: bool
) -> None:
    held = {"": 14, "reuse-fp32-param": 12, "low-precision-optimizer": 6 + moments}
    assert measured(monkeypatch, held)[1].met is met


def test_storages_count_once() -> None:
    before = live_bytes()
    tensor = torch.zeros(1000)
    views = [tensor[1:], tensor.view(10, 100)]
    assert live_bytes() - before == 4000
    del tensor, views
    assert live_bytes() == before


@pytest.mark.needs_plugins("reuse-fp32-param")
def test_both_states_of_a_run_are_counted(gloo_pool: GlooPool) -> None:
    """Moments are created by the first step; half of the master weights is never there."""
    shape = llama.SHAPES["tiny"]
    found = []
    for enable in ([], ["reuse-fp32-param"]):
        result = measured_on_ranks(gloo_pool, shape, 1, enable)
        numel = result["parameters"]
        found += result["ranks"]
        assert found[-1]["trained"] - found[-1]["built"] == pytest.approx(8 * numel, rel=0.02)
    without, with_it = (one["trained"] for one in found)
    assert without - with_it == pytest.approx(2 * numel, rel=0.005)
