"""The largest model: the search, when a row counts, and that all systems train the same."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import largest_model
from benchmarks.largest_model import FEW, Trained, benchmarks, largest
from benchmarks.protocol import NotMeasured, Settings, worker

FIRST = 500


def run_of(per_layer: int, ran: list[int], bend: int = 0) -> Any:
    """A system whose peak grows by as much per layer, and by ``bend`` after the few layers."""

    def run(layers: int) -> Trained:
        ran.append(layers)
        peak = FIRST + per_layer * layers + (bend if layers > FEW[1] else 0)
        return Trained(parameters=10 * layers, peak_bytes=peak, losses=[1.0])

    return run


@pytest.mark.parametrize("bend", [0, -45, 45, 30])
@pytest.mark.parametrize("limit", [899, 900, 901])
def test_the_largest_fits_and_the_next_does_not(bend: int, limit: int) -> None:
    ran: list[int] = []
    layers, found = largest(run_of(20, ran, bend), limit)
    assert layers == (limit - FIRST - bend) // 20
    assert found.peak_bytes <= limit < found.peak_bytes + 20
    assert {layers, layers + 1} <= {*ran}
    assert len(ran) <= 4 + abs(bend) // 20 + 1


def test_fewer_layers_than_extrapolated_from_may_fit() -> None:
    ran: list[int] = []
    assert largest(run_of(20, ran), FIRST + 50)[0] == 2
    with pytest.raises(NotMeasured, match="one layer takes 520 bytes"):
        largest(run_of(20, ran), FIRST)


@pytest.mark.parametrize(
    ("losses", "size", "met"),
    [([9.8, 9.9], 6, True), ([9.8, 9.9], 7, False), ([9.8, 9.7], 6, False), ([math.nan], 6, False)],
)
def test_a_row_counts_only_if_both_train_the_same(
    monkeypatch: pytest.MonkeyPatch, losses: list[float], size: int, met: bool
) -> None:
    def found(module: str, *words: str, **_: Any) -> dict[str, Any]:
        system, layers = words[1], int(words[3])
        per_layer = size * 2**24 if system == "ascend-run" else 2**28
        ours = losses if system == "ascend-run" else [9.8, 9.9]
        return {"parameters": layers * 10**6, "losses": ours, "peak_bytes": per_layer * layers}

    monkeypatch.setattr(largest_model, "worker", found)
    (benchmark,) = benchmarks()
    if math.isnan(losses[0]):
        with pytest.raises(NotMeasured, match="losses"):
            benchmark.measure(Settings())
        return
    row = benchmark.measure(Settings())
    assert row.goal == benchmark.goal
    assert row.met is met
    assert (row.ours, row.peer) == (256 // size, 16)
    assert row.note.startswith("FAILED") is (losses[1] != 9.9)


@pytest.mark.needs_plugins("recompute", "low-precision-optimizer", "swap-optimizer")
def test_all_systems_train_the_same_model(tmp_path: Path) -> None:
    words = ("--layers", "2", "--steps", "2", "--tiny", "--folder", str(tmp_path))
    results = {
        system: worker("largest_model_worker", "--system", system, *words)
        for system in ("ascend-run", "transformers")
    }
    ours, peer = results.values()
    assert ours["parameters"] == peer["parameters"]
    assert ours["losses"] == pytest.approx(peer["losses"], rel=1e-3)
    assert min(ours["peak_bytes"], peer["peak_bytes"]) > 10**8
