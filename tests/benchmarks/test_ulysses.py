"""The rows of Ulysses: ours and the plain exchange compute the same attention."""

from __future__ import annotations

import argparse
import math
from typing import Any

import pytest
import torch

from ascend_run.testing.pool import GlooPool
from benchmarks import ulysses, ulysses_worker
from benchmarks.protocol import Settings
from benchmarks.ring_attention import largest_difference
from benchmarks.ulysses_worker import SYSTEMS

SAMPLES = {"out/0/0": [1.0, -2.0]}


@pytest.mark.parametrize(("theirs", "met"), [(1.0, True), (math.nan, False)])
def test_speed_counts_only_where_both_computed_the_same(
    monkeypatch: pytest.MonkeyPatch, theirs: float, met: bool
) -> None:
    def result(module: str, _: str, system: str, *words: str) -> dict[str, Any]:
        assert (module, words[words.index("--steps") + 1]) == ("ulysses_worker", "20")
        if system == "ascend-run":
            return {"seconds": [1.0], "samples": SAMPLES}
        return {"seconds": [1.1], "samples": {"out/0/0": [theirs, -2.0]}}

    monkeypatch.setattr(ulysses, "worker", result)
    for benchmark in ulysses.benchmarks():
        row = benchmark.measure(Settings(pairs=2))
        assert (row.goal, row.ratio, row.met) == (">= 1.1 x", 1.1, met)


def _rank(system: str, groups: int, folder: str) -> dict[str, Any]:
    """One rank of the worker, on ranks of the pool, which have a group already."""
    rank = torch.distributed.get_rank()
    torch.distributed.destroy_process_group()
    return ulysses_worker.one_rank(
        argparse.Namespace(
            system=system,
            length=1024,
            batch=2,
            groups=groups,
            steps=1,
            warmup=1,
            rank=rank,
            store=f"{folder}/{system}{groups}",
        )
    )


@pytest.mark.needs_plugins("ulysses")
def test_the_worker_gives_the_same_samples_for_both(gloo_pool: GlooPool, tmp_path: Any) -> None:
    for groups in (1, 2):
        found = []
        for system in SYSTEMS:
            ranks = gloo_pool.run(_rank, 2, system, groups, str(tmp_path))
            assert all(len(rank["seconds"]) == 1 for rank in ranks)
            found.append(ranks[0]["samples"] | ranks[1]["samples"])
        assert largest_difference(*found) <= 1e-5
        assert len(found[0]) == 4 * (2 * 8 + 2 * groups)
