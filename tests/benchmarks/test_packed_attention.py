"""The row of packed documents: speed by the pair, and only of the documents' own attention."""

from __future__ import annotations

import argparse
import math
from typing import Any

import pytest

from ascend_run.testing.pool import GlooPool
from benchmarks import packed_attention, packed_worker
from benchmarks.packed_attention import DOCUMENTS, LENGTH, benchmarks, ends_of, pairs_of
from benchmarks.protocol import Settings
from benchmarks.rows import Row


def row_of(monkeypatch: pytest.MonkeyPatch, apart: float) -> Row:
    """Packed, 10 pairs take 1.1 s; dense, 20 take 2 s."""

    def result(module: str, *words: str) -> dict[str, Any]:
        assert module == "packed_worker"
        if "--packed" in words:
            return {"seconds": [1.1], "pairs": 10, "apart": apart}
        return {"seconds": [2.0], "pairs": 20, "apart": 0.0}

    monkeypatch.setattr(packed_attention, "worker", result)
    (benchmark,) = benchmarks()
    assert benchmark.goal == ">= 0.909 x"
    return benchmark.measure(Settings(pairs=2))


def test_the_times_of_a_pair_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    row = row_of(monkeypatch, 1e-7)
    assert row.met
    assert (row.ours, row.peer, row.ratio) == (1.1e11, 1e11, pytest.approx(1 / 1.1, abs=1e-3))


@pytest.mark.parametrize("apart", [1e-3, math.nan])
def test_another_attention_than_the_documents_makes_the_row_fail(
    monkeypatch: pytest.MonkeyPatch, apart: float
) -> None:
    row = row_of(monkeypatch, apart)
    assert not row.met
    assert row.note.startswith("FAILED: not a document's own attention")


def test_pairs_are_counted_within_documents() -> None:
    assert pairs_of((2, 5)) == 3 + 6
    assert ends_of(LENGTH)[-1] == sum(DOCUMENTS) == 8192
    assert ends_of(64)[-1] == 64


@pytest.mark.parametrize("packed", [False, True])
def test_the_worker_attends_to_documents_alone(gloo_pool: GlooPool, packed: bool) -> None:
    options = argparse.Namespace(packed=packed, length=256, steps=1, warmup=0)
    (result,) = gloo_pool.run(packed_worker.measure, 1, options)
    assert len(result["seconds"]) == 1
    assert result["pairs"] == pairs_of(ends_of(256) if packed else (256,))
    assert result["apart"] <= 1e-5
