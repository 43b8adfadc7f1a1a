"""The rows of ring attention: speed counts only where both computed the same attention."""

from __future__ import annotations

import argparse
import math
from typing import Any

import pytest
import torch

from ascend_run.testing.pool import GlooPool
from benchmarks import ring_attention, ring_worker
from benchmarks.protocol import Settings
from benchmarks.ring_attention import benchmarks, largest_difference
from benchmarks.rows import Row

SAMPLES = {"out/0/0": [1.0, -2.0], "dq/0/0": [100.0, 50.0]}


def row_with(monkeypatch: pytest.MonkeyPatch, index: int, samples: dict[str, list[float]]) -> Row:
    """A row where ours takes 1.0 s and the other 1.1 s."""

    def result(module: str, _: str, system: str, *words: str, python: Any = None) -> dict[str, Any]:
        ours = system == "ascend-run"
        assert (python is not None) == (system == "ring-flash-attn")
        return {"seconds": [1.0 if ours else 1.1], "samples": SAMPLES if ours else samples}

    monkeypatch.setattr(ring_attention, "worker", result)
    return benchmarks()[index].measure(Settings(pairs=2))


@pytest.mark.parametrize("index", [0, 1, 2])
def test_equal_outputs_give_the_ratio_of_the_times(
    monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    row = row_with(monkeypatch, index, SAMPLES)
    assert (row.ours, row.peer, row.ratio) == (1000, 1100, 1.1)
    assert row.met
    assert "output and gradients within 0.0e+00" in row.note


@pytest.mark.parametrize("wrong", [-2.001, math.nan])
def test_another_output_makes_the_row_fail(monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    row = row_with(monkeypatch, 0, {**SAMPLES, "out/0/0": [1.0, wrong]})
    assert not row.met
    assert row.note.startswith("FAILED: not the same attention")


def test_errors_are_relative_to_the_tensor_and_missing_samples_fail() -> None:
    """An error is relative to its own tensor; missing samples never count as equal."""
    other = {**SAMPLES, "dq/0/0": [100.1, 50.0]}
    assert largest_difference(SAMPLES, other) == pytest.approx(1e-3, rel=1e-2)
    assert math.isnan(largest_difference(SAMPLES, {"out/0/0": [1.0, -2.0]}))
    assert math.isnan(largest_difference({}, {}))


def test_the_goals_are_those_asked() -> None:
    assert [b.goal for b in benchmarks()] == [">= 0.85 x", ">= 1 x", ">= 0.75 x"]


def _rank(system: str, folder: str) -> dict[str, Any]:
    """One rank of the worker, on ranks of the pool, which have a group already."""
    rank = torch.distributed.get_rank()
    torch.distributed.destroy_process_group()
    return ring_worker.one_rank(
        argparse.Namespace(
            system=system, length=128, steps=1, warmup=1, rank=rank, store=f"{folder}/{system}"
        )
    )


@pytest.mark.needs_plugins("ring-attention")
def test_the_worker_gives_equal_samples_for_ring_and_full_sequences(
    gloo_pool: GlooPool, tmp_path: Any
) -> None:
    found = []
    for system in ("ascend-run", "ideal"):
        ranks = gloo_pool.run(_rank, 2, system, str(tmp_path))
        assert all(len(rank["seconds"]) == 1 for rank in ranks)
        found.append(ranks[0]["samples"] | ranks[1]["samples"])
    assert largest_difference(*found) <= 1e-5
    assert len(found[0]) == 4 * 1 * 8
