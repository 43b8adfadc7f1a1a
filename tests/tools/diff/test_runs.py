"""True runs with one thing changed: ``diff`` finds the step, the part, and the cause."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from ascend_run.core.data.index_cache import IndexCache
from ascend_run.entrypoints.cli import run as command_line
from ascend_run.testing.pool import GlooPool

from . import jobs

SAVING = {"checkpoint.save_interval": 3}


@attrs.frozen
class Compared:
    """What ``diff --json`` says, and its exit code."""

    code: int
    result: dict[str, Any]

    @property
    def first(self) -> tuple[int, tuple[str, ...]]:
        found = self.result["first_difference"]
        return found["step"], tuple(found["parts"])

    @property
    def causes(self) -> dict[str, list[str]]:
        return {f"{d['kind']} {d['name']}": d["values"] for d in self.result["differences"]}

    @property
    def origins(self) -> dict[str, list[str]]:
        return {d["name"]: d["origins"] for d in self.result["differences"]}


Compare = Callable[[Path], Compared]


@attrs.frozen
class Runs:
    """Runs on one dataset, in folders of their own."""

    pool: GlooPool
    folder: Path
    data: str

    def __call__(self, name: str, world_size: int = 1, **options: Any) -> Path:
        values = {
            "data.train": [self.data],
            "data.cache_dir": str(self.folder / "cache"),
            **options.pop("values", {}),
        }
        self.pool.run(jobs.run, world_size, str(self.folder / name), values, timeout=100, **options)
        return self.folder / name


@pytest.fixture(scope="module")
def runs(gloo_pool: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    return Runs(gloo_pool, folder, jobs.tokens(folder / "data", seed=1))


@pytest.fixture(scope="module")
def base(runs: Runs) -> Path:
    return runs("base")


@pytest.fixture
def compare(base: Path, capsys: pytest.CaptureFixture[str]) -> Compare:
    def against_base(other: Path) -> Compared:
        code = command_line(["diff", str(base), str(other), "--json"])
        return Compared(code, json.loads(capsys.readouterr().out))

    return against_base


@pytest.fixture(scope="module")
def half(runs: Runs) -> Path:
    """A run that died before step 5 and saved step 3 last."""
    return runs("half", values=SAVING, die_at=4)


def test_equal_runs_are_identical(runs: Runs, compare: Compare) -> None:
    found = compare(runs("again"))
    assert found.code == 0
    assert found.result["identical"] is True
    assert found.result["first_difference"] is None
    assert found.result["compared"] == {"first_step": 0, "last_step": 6, "steps": 7}
    assert found.result["differences"] == []


def test_a_resumed_run_is_identical_to_one_that_was_not_interrupted(
    runs: Runs, half: Path, compare: Compare
) -> None:
    shutil.copytree(half, runs.folder / "resumed")
    found = compare(runs("resumed", values=SAVING))
    assert found.code == 0
    assert found.result["identical"] is True
    assert found.result["runs"][1]["superseded"] == 1
    assert found.causes == {"config checkpoint.save_interval": ["0", "3"]}


def test_another_rate_after_a_resumption_is_found_at_its_first_update(
    runs: Runs, half: Path, compare: Compare
) -> None:
    shutil.copytree(half, runs.folder / "faster")
    found = compare(runs("faster", values={**SAVING, "optimizer.lr": 2e-3}))
    assert found.code == 1
    assert found.first == (4, ("parameters",))
    assert found.causes["config optimizer.lr"] == ["0.001", "0.002"]
    assert found.origins["optimizer.lr"] == ["the test", "the test"]


def test_another_seed_begins_with_other_weights(runs: Runs, compare: Compare) -> None:
    found = compare(runs("seed", values={"run.seed": 18}))
    assert found.code == 1
    assert found.first == (0, ("parameters",))
    # It shuffles too: the same position is of other samples.
    assert [*found.causes] == ["config run.seed", "data samples of step 1"]
    assert found.causes["config run.seed"] == ["17", "18"]
    assert found.result["steps"][1]["consumed_samples"] == [2, 2]


def test_another_order_of_the_same_samples_is_found(runs: Runs, compare: Compare) -> None:
    """The kept order of an epoch is not what it was, as by a version that computes another."""
    cache = runs.folder / "cache"
    kept = runs.folder / "kept-cache"
    shutil.copytree(cache, kept)
    for order in cache.glob("*/shuffle.npy"):
        description = json.loads(order.with_name("record.json").read_text())["description"]
        arrays = {path.stem: np.load(path) for path in order.parent.glob("*.npy")}
        other = {**arrays, "shuffle": arrays["shuffle"][::-1]}
        shutil.rmtree(order.parent)
        IndexCache(cache).arrays(description, partial(dict, other))
    try:
        found = compare(runs("order"))
    finally:
        shutil.copytree(kept, cache, dirs_exist_ok=True)
    assert found.first == (1, ("batch", "loss", "grad_norm", "parameters"))
    assert [*found.causes] == ["data samples of step 1"]


def test_another_plugin_is_found_where_it_first_acts(runs: Runs, compare: Compare) -> None:
    found = compare(runs("plugin", added_at=2))
    assert found.first == (2, ("parameters",))
    assert found.causes == {"plugin added": ["not enabled", "enabled"]}


def test_a_flipped_bit_of_one_weight_is_found(runs: Runs, compare: Compare) -> None:
    found = compare(runs("flip", flip_at=5))
    assert found.first == (5, ("parameters",))
    assert found.result["differences"] == []


def test_other_data_is_found_at_the_first_step(runs: Runs, compare: Compare) -> None:
    other = attrs.evolve(runs, data=jobs.tokens(runs.folder / "other-data", seed=2))
    found = compare(other("data"))
    assert found.first == (1, ("batch", "loss", "grad_norm", "parameters"))
    assert [*found.causes] == ["config data.train", "data samples of step 1"]


def test_other_contents_of_the_same_file_are_a_cause(runs: Runs, compare: Compare) -> None:
    kept = runs.folder / "kept"
    shutil.copytree(runs.folder / "data", kept)
    jobs.tokens(runs.folder / "data", seed=2)
    try:
        found = compare(runs("contents", values={"data.cache_dir": str(runs.folder / "cache2")}))
    finally:
        shutil.copytree(kept, runs.folder / "data", dirs_exist_ok=True)
    assert found.first[0] == 1
    cause = found.causes[f"data {runs.data}.bin"]
    assert cause[0] != cause[1]
    assert f"data {runs.data}.idx" not in found.causes


def test_another_batch_size_is_another_data_position(runs: Runs, compare: Compare) -> None:
    found = compare(runs("batch", values={"train.global_batch_size": 1}))
    assert found.first[0] == 1
    assert found.first[1][0] == "consumed_samples"
    assert found.result["steps"][1]["consumed_samples"] == [2, 1]
    assert found.causes["data position after step 1"] == ["2", "1"]


def test_another_layout_begins_alike_and_parts_by_rounding(
    runs: Runs, base: Path, compare: Compare
) -> None:
    other = runs("layout", 2, values={"parallel.tensor_model_parallel_size": 2})
    found = compare(other)
    lines = [
        [json.loads(line) for line in (folder / "fingerprint.jsonl").read_text().splitlines()][1:]
        for folder in (base, other)
    ]
    parts = ("loss", "grad_norm", "parameters")
    truth = next(
        one["step"]
        for one, two in zip(*lines, strict=True)
        if any(one[part] != two[part] for part in parts)
    )
    assert truth > 0, "initial weights do not depend on the layout"
    assert [one["batch"] for one in lines[0]] == [two["batch"] for two in lines[1]]
    assert found.code == 1
    assert found.first[0] == truth
    assert found.causes["layout ranks"] == ["1", "2"]
    assert found.causes["layout tp"] == ["1", "2"]
    assert found.result["largest_loss_difference"]["nats"] < 1e-4


def test_runs_of_different_length_are_compared_as_far_as_both_go(
    half: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line(["diff", str(half), str(base)]) == 0
    text = capsys.readouterr().out
    assert "identical over steps 0 to 4" in text
    assert "B continues to step 6" in text
