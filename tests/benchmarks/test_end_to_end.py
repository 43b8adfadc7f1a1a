"""The end-to-end rows: speed counts only where both trained the same model."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import end_to_end, protocol
from benchmarks.end_to_end import PEERS, benchmarks, largest_difference
from benchmarks.protocol import Settings
from benchmarks.rows import Row


def row_with(monkeypatch: pytest.MonkeyPatch, peer_losses: list[float]) -> Row:
    """The first fp32 row where ours is twice as fast, and its losses are 9.7 and 9.6."""

    def result(module: str, _: str, system: str, *words: str, **options: Any) -> dict[str, Any]:
        ours = system == "ascend-run"
        assert ("python" in options) is not ours  # a peer runs in the peers' venv
        return {
            "tokens_per_second": 200.0 if ours else 100.0,
            "losses": [9.7, 9.6] if ours else peer_losses,
            "peak_bytes": 2**30,
            "device": None,
        }

    monkeypatch.setattr(end_to_end, "worker", result)
    benchmark = next(b for b in benchmarks() if "fp32" in b.name)
    return benchmark.measure(Settings(pairs=2))


def test_equal_losses_give_the_ratio_of_the_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    row = row_with(monkeypatch, [9.7, 9.601])
    assert row.ratio == 2.0
    assert row.met
    assert "losses within 1.0e-04" in row.note
    assert "peak 1.00 / 1.00 GiB" in row.note


@pytest.mark.parametrize("losses", [[9.7, 9.5], [9.6, 9.6], [9.7, math.nan]])
def test_other_losses_make_the_row_fail_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch, losses: list[float]
) -> None:
    row = row_with(monkeypatch, losses)
    assert row.ratio == 2.0
    assert not row.met
    assert "FAILED: not the same model: losses 9.70000, 9.60000 against" in row.note


def test_a_nan_among_the_losses_is_no_agreement() -> None:
    assert math.isnan(largest_difference([1.0, math.nan], [1.0, 1.0]))
    assert math.isnan(largest_difference([math.nan, 1.0], [1.0, 1.0]))


def test_each_precision_has_a_row_and_a_goal_for_each_peer() -> None:
    goals = [">= 1.35 x", ">= 1 x", ">= 1.05 x", ">= 0.95 x", ">= 0.95 x"]
    assert [b.goal for b in benchmarks()] == [*goals * 2, ">= 1.3 x"]
    assert len(benchmarks()) == 2 * len(PEERS) + 1


def test_both_sides_of_the_slower_processor_have_its_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Any] = []

    def run(words: Any, variables: Any = None) -> Any:
        given.append(variables)
        result = {"tokens_per_second": 1.0, "losses": [9.7], "peak_bytes": 1, "device": None}
        return SimpleNamespace(stdout=json.dumps(result))

    monkeypatch.setattr(protocol, "run", run)
    row = benchmarks()[-1].measure(Settings(pairs=2, peers_python=Path(sys.executable)))
    assert given == [{"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}] * 4
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE, which stands in for such a processor" in row.note


def test_a_peer_runs_in_the_environment_that_it_is_installed_in() -> None:
    settings = Settings(peers_python=Path("theirs"))
    found = {peer.system: peer.python(settings) for peer in PEERS}
    assert found == {
        "megatron-local": Path("theirs"),
        "litgpt": Path("theirs"),
        "litgpt-compiled": Path("theirs"),
        "transformers-compiled": None,
    }
