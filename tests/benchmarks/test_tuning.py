"""The rows of fine-tuning: when they count, and that both systems train the same."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tuning
from benchmarks.protocol import Settings, worker
from benchmarks.rows import Row
from benchmarks.tuning import METRICS, TOLERANCE, benchmarks, differences, our_run, speed
from benchmarks.tuning_data import Function, functions

SIZES = {"records": 8, "samples": 2, "tokens": 90, "quartiles": [4.0, 9.0, 12.0], "longest": 30}
STEPS = {
    "sft": {"loss": [9.1, 9.0], "grad_norm": [1.4, 1.3]},
    "dpo": {"loss": [0.69, 0.6], "grad_norm": [2.0, 1.9], "logps/chosen": [-50.0, -49.0],
            "logps/rejected": [-40.0, -41.0]},
}  # fmt: skip


def result(task: str, seconds: float) -> dict[str, Any]:
    """Of two steps, the first of which is not counted."""
    none: dict[str, list[float]] = {name: [] for name in METRICS}
    return {**none, **STEPS[task], "seconds": [99.0, seconds]}


def rows(monkeypatch: pytest.MonkeyPatch, changed: dict[str, list[float]]) -> list[Row]:
    """Return all rows where a step takes 2 s, with these metrics changed, and one of trl 4 s."""

    def ours(task: str, *_: Any) -> dict[str, Any]:
        return {**result(task, 2.0), **changed}

    def theirs(module: str, *words: Any) -> dict[str, Any]:
        if module == "tuning_data":
            return {"sft": SIZES, "dpo": SIZES}
        return result(words[words.index("--task") + 1], 4.0)

    monkeypatch.setattr(tuning, "our_run", ours)
    monkeypatch.setattr(tuning, "worker", theirs)
    return [benchmark.measure(Settings(pairs=2, steps=1)) for benchmark in benchmarks()]


def test_equal_metrics_give_the_ratio_of_the_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    for row, benchmark in zip(rows(monkeypatch, {}), benchmarks(), strict=True):
        assert (row.name, row.goal) == (benchmark.name, benchmark.goal)
        assert (row.ours, row.peer, row.ratio, row.met) == (4.0, 2.0, 2.0, True)
        assert "every metric of 2 steps within 0.0e+00" in row.note


@pytest.mark.parametrize("value", [2.0 * (1 + 2 * TOLERANCE["bf16"]), math.nan])
@pytest.mark.parametrize("name", METRICS)
def test_another_metric_of_any_step_makes_a_row_fail(
    monkeypatch: pytest.MonkeyPatch, name: str, value: float
) -> None:
    tasks = [task for task, steps in STEPS.items() if name in steps]
    for row in rows(monkeypatch, {name: [2.0, value]}):
        fails = row.name.split()[0] in tasks
        assert row.met is not fails
        assert ("FAILED: not the same training: loss" in row.note) is fails


def test_a_metric_that_only_one_has_is_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        differences({**result("sft", 1.0), "loss": [9.1]}, result("sft", 1.0))


def test_the_first_step_does_not_count_towards_the_speed() -> None:
    assert speed({"seconds": [100.0, 2.0, 8.0, 4.0]}, 12, 1) == 3.0


def test_every_task_and_precision_has_a_row() -> None:
    assert [(*benchmark.name.split()[:1], benchmark.name[-6:]) for benchmark in benchmarks()] == [
        ("sft", "packed"),
        ("sft", "padded"),
        ("dpo", "padded"),
    ] * 2


def test_a_function_is_its_head_its_documentation_and_its_body() -> None:
    lines = ["class A:", "    def f(self,", "          x):", '        """Doc."""']
    lines += ["        y = x", "        return y", "def g(): return 1", ""]
    assert [*functions("\n".join(lines), "m")] == [
        Function(
            module="m",
            head="def f(self,\n      x):",
            documentation="Doc.",
            body="y = x\nreturn y",
        )
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("tuning")
    return path, worker("tuning_data", path, "--tiny", "--samples", "2")


@pytest.mark.exhaustive(by=lambda task: ())
@pytest.mark.needs_plugins("lora")
@pytest.mark.parametrize(("task", "grouping"), [("sft", "packed"), ("dpo", "padded")])
def test_both_train_the_same(folder: tuple[Path, dict[str, Any]], task: str, grouping: str) -> None:
    path, sizes = folder
    ours = our_run(task, "fp32", path, sizes[task]["samples"], 2)
    words = ["--task", task, "--grouping", grouping, "--dtype", "fp32", "--steps", "2"]
    theirs = worker("tuning_worker", path, path / "trl", *words)
    assert len(ours["seconds"]) == len(theirs["seconds"]) == 2
    assert all(len(theirs[name]) == 2 for name in STEPS[task])
    assert differences(ours, theirs) <= TOLERANCE["fp32"]
    assert len((path / f"{task}.jsonl").read_text().splitlines()) == sizes[task]["records"]
