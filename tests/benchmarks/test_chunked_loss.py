"""The rows of the loss: speed and bytes count only where both computed the same."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from benchmarks import chunked_loss, chunked_loss_worker
from benchmarks.expert_mlps_worker import difference
from benchmarks.protocol import Settings

TINY = ["--tokens", "48", "--hidden", "16", "--words", "96"]


def results_of(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> None:
    """Replace the worker by one with these results."""
    result = {"ours": [1.0, 1.0], "peer": [1.5, 1.5], "ours_bytes": 14, "peer_bytes": 100}
    result |= {"difference": 0.0, "gradient_bytes": 7, **changed}

    def worker(module: str, *_: str, **__: Any) -> dict[str, Any]:
        assert module == "chunked_loss_worker"
        return result

    monkeypatch.setattr(chunked_loss, "worker", worker)


@pytest.mark.parametrize(("apart", "met"), [(0.0, True), (0.1, False), (math.nan, False)])
def test_rows_count_only_if_results_are_equal(
    monkeypatch: pytest.MonkeyPatch, apart: float, met: bool
) -> None:
    results_of(monkeypatch, difference=apart)
    rows = [benchmark.measure(Settings(pairs=2)) for benchmark in chunked_loss.benchmarks()]
    assert [row.met for row in rows] == [met] * 4
    assert [row.goal for row in rows] == [b.goal for b in chunked_loss.benchmarks()]
    assert [row.ratio for row in rows] == [1.5, None] * 2


def test_a_sixth_of_the_bytes_is_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    results_of(monkeypatch, ours_bytes=16)
    rows = [b.measure(Settings(pairs=2)) for b in chunked_loss.benchmarks()]
    assert all(row.met for row in rows[::2])
    assert [(row.ours, row.met) for row in rows[1::2]] == [(16.0, False)] * 2


def test_each_row_measures_what_its_name_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def worker(_: str, *words: str, **__: Any) -> dict[str, Any]:
        asked.append("--by-token" in words)
        return {"difference": 1.0, "ours": [1.0], "peer": [1.0], "gradient_bytes": 1} | {
            "ours_bytes": 1,
            "peer_bytes": 1,
        }

    monkeypatch.setattr(chunked_loss, "worker", worker)
    names = [b.measure(Settings(pairs=1)).name for b in chunked_loss.benchmarks()]
    assert [name.startswith("log-probabilities") for name in names] == asked
    assert asked == [False, False, True, True]


@pytest.mark.parametrize("more", [[], ["--by-token"]], ids=["loss", "log-probabilities"])
def test_both_compute_the_same(capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    words = [*TINY, "--dtype", "fp32", "--pairs", "2", "--steps", "1"]
    chunked_loss_worker.main([*words, *more])
    result = json.loads(capsys.readouterr().out)
    assert result["difference"] <= 1e-5
    assert (len(result["ours"]), len(result["peer"])) == (2, 2)


@pytest.mark.parametrize("steps", [chunked_loss_worker.steps, chunked_loss_worker.token_steps])
@pytest.mark.parametrize("index", range(3))
def test_a_difference_of_a_value_or_a_gradient_is_seen(index: int, steps: Any) -> None:
    inputs = chunked_loss_worker.leaves(8, 4, 12, torch.float32)
    ours, peer = steps(inputs)
    wrong = [tensor.clone() for tensor in ours()]
    assert difference(wrong, peer()) <= 1e-5
    wrong[index].view(-1)[-1] += wrong[index].abs().max()
    assert difference(wrong, peer()) > 0.5


def test_the_peak_of_all_logits_is_theirs_three_times_and_a_gradient() -> None:
    """Logits and their logarithms of probabilities are kept; gradients of both are made."""
    inputs = chunked_loss_worker.leaves(512, 8, 1024, torch.float32)
    logits = 512 * 1024 * 4
    _, peer = chunked_loss_worker.steps(inputs)
    assert 3 * logits <= chunked_loss_worker.peak_bytes(peer, inputs) <= 3.2 * logits
