"""The rows of adapters: cc-lora, fused-mlp and lora alone train the same model."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ascend_run.testing.pool import GlooPool
from benchmarks import adapter_steps
from benchmarks.adapter_steps_rank import SYSTEMS, one_rank
from benchmarks.adapter_steps_worker import of_all_ranks
from benchmarks.end_to_end import largest_difference
from benchmarks.protocol import Settings


@pytest.mark.parametrize(("theirs", "met"), [(2.0, True), (math.nan, False), (2.1, False)])
def test_speed_counts_only_where_both_trained_the_same(
    monkeypatch: pytest.MonkeyPatch, theirs: float, met: bool
) -> None:
    def result(module: str, _: str, system: str, *words: str) -> dict[str, Any]:
        assert module == "adapter_steps_worker"
        ours = system in adapter_steps.FEATURES
        return {"losses": [2.0 if ours else theirs], "tokens_per_second": 11.0 if ours else 10.0}

    monkeypatch.setattr(adapter_steps, "worker", result)
    for benchmark in adapter_steps.benchmarks():
        row = benchmark.measure(Settings(pairs=2))
        assert (row.goal, row.met) == (">= 1 x", met)


def test_a_step_takes_the_time_of_its_slowest_rank() -> None:
    ranks = [
        {"losses": [1.0], "seconds": seconds, "tokens": 12} for seconds in ([1.0, 4.0], [2.0, 1.0])
    ]
    assert of_all_ranks(ranks) == {"losses": [1.0], "tokens_per_second": 12 / 3}


@pytest.mark.needs_plugins("lora", "cc-lora", "fused-mlp")
def test_the_worker_trains_the_same_by_both(gloo_pool: GlooPool) -> None:
    tiny = {"data.seq_length": 16, "train.global_batch_size": 2}
    found = [gloo_pool.run(one_rank, 2, name, "sequence", 2, 1, tiny) for name in SYSTEMS]
    assert all(len(rank["seconds"]) == 2 for ranks in found for rank in ranks)
    alone, *others = (ranks[0]["losses"] for ranks in found)
    assert all(largest_difference(losses, alone) <= 1e-5 for losses in others)
