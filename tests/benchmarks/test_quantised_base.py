"""The rows of a quantised base: which results count."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import quantised_base
from benchmarks.protocol import Settings
from benchmarks.rows import Row


def measured(
    monkeypatch: pytest.MonkeyPatch, held: int = 258, speed: float = 1.0, loss: float = 2.0
) -> list[Row]:
    """The rows, if of 1000 bytes so many are held, and ours is so many times as fast."""

    def worker(module: str, what: str, *words: str) -> dict[str, Any]:
        assert module == "quantised_base_worker"
        if what == "write":
            return {}
        sizes = {"held": held, "in_bf16": 1000}
        ours = {"tokens_per_second": 100 * speed, "losses": [2.0, loss]}
        if what == "ascend-run":
            return {**ours, "linears": sizes, "model": sizes}
        return {"tokens_per_second": 100, "losses": [2.0, 2.0]}

    monkeypatch.setattr(quantised_base, "worker", worker)
    planned = {"lora": 1000, "lora,qlora": held}
    monkeypatch.setattr(quantised_base, "_planned", planned.get)
    settings = Settings(pairs=3)
    rows = [benchmark.measure(settings) for benchmark in quantised_base.benchmarks()]
    assert [row.goal for row in rows] == [one.goal for one in quantised_base.benchmarks()]
    return rows


@pytest.mark.parametrize(("held", "met"), [(290, True), (291, False)])
def test_at_most_29_percent_are_held(monkeypatch: pytest.MonkeyPatch, held: int, met: bool) -> None:
    assert [row.met for row in measured(monkeypatch, held=held)[:2]] == [met, met]


@pytest.mark.parametrize(("speed", "met"), [(1.0, True), (0.99, False)])
def test_a_step_is_as_fast_as_the_peers(
    monkeypatch: pytest.MonkeyPatch, speed: float, met: bool
) -> None:
    assert measured(monkeypatch, speed=speed)[2].met is met


def test_other_losses_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    row = measured(monkeypatch, speed=2.0, loss=2.1)[2]
    assert not row.met
    assert "FAILED: not the same model: losses" in row.note


def test_the_planned_bytes_of_seven_billion_weights() -> None:
    assert quantised_base._planned("lora") == pytest.approx(13.48e9, rel=1e-3)
