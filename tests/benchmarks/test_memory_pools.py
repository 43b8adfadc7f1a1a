"""The rows of separate pools: a recorded run, replayed."""

from __future__ import annotations

from typing import Any

import pytest

from ascend_run.testing.pool import GlooPool
from benchmarks import llama, memory_pools
from benchmarks.memory_pools_worker import recorded, reserved
from benchmarks.protocol import Settings


@pytest.mark.parametrize(("one_pool", "met"), [(10, True), (9, False)])
def test_two_pools_must_not_reserve_more(
    monkeypatch: pytest.MonkeyPatch, one_pool: int, met: bool
) -> None:
    def worker(module: str) -> dict[str, Any]:
        assert module == "memory_pools_worker"
        result = {"one_pool": one_pool << 20, "two_pools": 10 << 20, "allocated": 8 << 20}
        return {**result, "allocations": 77}

    monkeypatch.setattr(memory_pools, "worker", worker)
    (benchmark,) = memory_pools.benchmarks()
    row = benchmark.measure(Settings())
    assert (row.name, row.goal) == (benchmark.name, benchmark.goal)
    assert (row.ours, row.peer, row.met) == (10, one_pool, met)
    assert "77 allocations" in row.note


@pytest.mark.needs_plugins("memory-fragmentation")
def test_a_run_is_recorded_and_replayed(gloo_pool: GlooPool) -> None:
    """A second pool costs a tiny model a segment of small blocks. What lasts is marked: weights,
    master weights and moments, 14 bytes per parameter and more."""
    shape = llama.SHAPES["tiny"]
    trace = recorded(gloo_pool, shape)
    small, large = (reserved(trace, factor) for factor in (1, 4096))
    assert small["allocations"] == len(trace) > 1000
    assert small["two_pools"] - small["one_pool"] == 2 << 20
    assert large["allocated"] == pytest.approx(4096 * small["allocated"], rel=0.1)
    assert large["allocated"] < min(large["one_pool"], large["two_pools"])
    lasting = {one.storage: one.nbytes for one in trace if one.long_lived}
    assert sum(lasting.values()) > 14 * shape.num_parameters()
    assert len(lasting) < len({one.storage for one in trace}) / 2
