"""Log-probabilities of the reference computed before the first step: the run is, in every bit, that
with the reference beside it, which is then neither built nor run."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api import hookimpl
from ascend_run.plugin_api.manifest import Manifest
from ascend_run.testing.pool import GlooPool
from tests.core.train.runs import Ended, assert_same, whole_run
from tests.support.needed_plugins import names_of
from tests.support.preference_files import write_models_and_pairs

from .test_training import LAYOUTS, values

PRECOMPUTED = {"plugins__dpo__precompute_ref_log_probs": True}
STEPS = 5
Job = Callable[..., list[Ended]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models_and_pairs(tmp_path_factory.mktemp("dpo"), 9)


class Built:
    """A plugin that notes which models are built, and whether any is held beside the policy."""

    manifest = Manifest(name="built", summary="note which models are built")

    def __init__(self) -> None:
        self.roles: list[str] = []
        self.weights: list[Any] = []
        self.held: list[bool] = []

    @hookimpl
    def ascend_configure(self, role: str) -> c.Wrapper[Mapping[str, Any]]:
        self.roles.append(role)
        return lambda arguments: arguments

    @hookimpl
    def ascend_model(self, role: str) -> c.ModuleWrapper | None:
        def wrap(model: Any) -> Any:
            if role != "policy":
                self.weights += [weakref.ref(parameter) for parameter in model.parameters()]
            return model

        return wrap

    @hookimpl
    def ascend_before_step(self, context: c.RunContext) -> None:
        self.held.append(any(reference() is not None for reference in self.weights))

    @hookimpl
    def ascend_after_run(self, context: c.RunContext) -> None:
        if context.layout.rank == 0:
            found = {"roles": self.roles, "held": any(self.held)}
            (Path(context.config.run.output_dir) / "built.json").write_text(json.dumps(found))


def train(values: Mapping[str, Any], enable: Any = ()) -> Ended:
    """A job for the pool."""
    return whole_run(values, enable, Built())


@pytest.fixture
def run(gloo_pool: GlooPool, models: Path, tmp_path: Path) -> Job:
    """Return a function that trains in a folder of its own."""

    def job(name: str, ranks: int = 1, enable: Any = (), **changes: Any) -> list[Ended]:
        options = {
            "train__train_iters": STEPS,
            "train__global_batch_size": 4,
            "plugins__dpo__shuffle": True,
            "plugins__dpo__packing": True,
            "data__cache_dir": str(tmp_path / "cache"),
            **changes,
        }
        return gloo_pool.run(
            train, ranks, values(models, tmp_path / name, **options), enable, timeout=100
        )

    return job


def built(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "built.json").read_text())
    return found


def sources(folder: Path) -> list[str]:
    """Where the log-probabilities of each dataset came from, by the log."""
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [line["source"] for line in lines if line["event"] == "dpo.reference_log_probs"]


CASES: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    **{
        name: (ranks, {**changes, "train__micro_batch_size": 1}, plugins)
        for name, (ranks, changes, plugins) in LAYOUTS.items()
        if name not in ("one, all at once", "pp=2, two rows")
    },
    "another folder": (1, {"plugins__dpo__reference": "other"}, ()),
    "bf16": (1, {"train__precision": "bf16", "plugins__dpo__reference": "other"}, ()),
    "ipo, one pair a sample": (
        2,
        {"plugins__dpo__loss": "ipo", "plugins__dpo__packing": False},
        (),
    ),
    "base": (1, {"plugins__lora__rank": 4, "plugins__lora__export": False}, ("lora",)),
    "tp=2, base": (
        2,
        {
            "parallel__tensor_model_parallel_size": 2,
            "plugins__lora__rank": 4,
            "plugins__lora__export": False,
        },
        ("lora",),
    ),
}


@pytest.mark.exhaustive(by=lambda case: [CASES[case][0] > 1, bool(CASES[case][2])])
@pytest.mark.parametrize("case", names_of(CASES, lambda case: case[2]))
def test_a_run_is_that_beside_the_reference_in_every_bit(
    run: Job, models: Path, tmp_path: Path, case: str
) -> None:
    """Evaluations too. The nine pairs fill fewer samples than the steps read, so epochs repeat."""
    ranks, changes, plugins = CASES[case]
    if "plugins__dpo__reference" in changes:
        changes = {**changes, "plugins__dpo__reference": str(models / "other")}
    evaluated = {"train__eval_interval": 2, "train__eval_iters": 1}
    live = run("live", ranks, plugins, **changes, **evaluated)
    ahead = run("ahead", ranks, plugins, **changes, **evaluated, **PRECOMPUTED)
    assert_same(ahead, live)
    assert ahead[0].readings == live[0].readings
    assert sources(tmp_path / "ahead") == ["computed before the first step"] * 2
    margins = [line["rewards/margins"] for line in live[0].readings if "loss" in line]
    assert abs(margins[-1]) > 1e-4
    assert not built(tmp_path / "ahead")["held"]


@pytest.mark.parametrize("layout", ["one", "pp=2"])
def test_another_run_of_the_same_reference_builds_none(
    run: Job, models: Path, tmp_path: Path, layout: str
) -> None:
    ranks, changes, _ = LAYOUTS[layout]
    other = {**changes, **PRECOMPUTED, "plugins__dpo__reference": str(models / "other")}
    run("first", ranks, **other)
    assert built(tmp_path / "first") == {"roles": ["policy", "reference"], "held": False}
    second = run("second", ranks, **other, optimizer__lr=1e-4, plugins__dpo__beta=0.5)
    assert built(tmp_path / "second")["roles"] == ["policy"]
    assert sources(tmp_path / "second") == ["cache"]
    live = {**other, "plugins__dpo__precompute_ref_log_probs": False}
    assert_same(second, run("live", ranks, **live, optimizer__lr=1e-4, plugins__dpo__beta=0.5))
    assert built(tmp_path / "live")["held"]


def test_what_the_values_depend_on_computes_them_again(
    run: Job, models: Path, tmp_path: Path
) -> None:
    changing = tmp_path / "changing"
    shutil.copytree(models / "other", changing)
    options = {**PRECOMPUTED, "plugins__dpo__reference": str(changing), "train__train_iters": 1}

    def source(name: str, **changes: Any) -> str:
        run(name, **{**options, **changes})
        (found,) = sources(tmp_path / name)
        return found

    assert source("first") == "computed before the first step"
    assert source("again") == "cache"
    assert source("bf16", train__precision="bf16") == "computed before the first step"
    assert source("longer", data__seq_length=160) == "computed before the first step"
    assert source("pairs", data__train=[str(models / "held-out.jsonl")]).startswith("computed")
    shutil.copy(models / "model" / "model.safetensors", changing)
    assert source("changed") == "computed before the first step"


@pytest.mark.needs_plugins("lora")
def test_other_adapters_in_their_folder_compute_them_again(run: Job, tmp_path: Path) -> None:
    """With ``plugins.lora.load`` the reference is the base with the adapters that were loaded."""
    once = {"train__train_iters": 1, "plugins__lora__rank": 4}
    run("trained", enable=("lora",), **once, plugins__lora__export=True)
    folder = tmp_path / "trained" / "adapter"
    loads = {**PRECOMPUTED, "plugins__lora__load": str(folder), "plugins__lora__export": False}

    def source(name: str) -> str:
        (ended,) = run(name, enable=("lora",), **once, **loads)
        assert ended.readings[0]["rewards/margins"] == 0.0  # the policy begins with them too
        (found,) = sources(tmp_path / name)
        return found

    assert source("first") == "computed before the first step"
    file = folder / "adapter_model.safetensors"
    with safe_open(file, framework="pt") as stored:
        metadata = stored.metadata()
    save_file({name: value + 0.1 for name, value in load_file(file).items()}, file, metadata)
    assert source("changed") == "computed before the first step"


def test_damaged_values_are_computed_again(run: Job, models: Path, tmp_path: Path) -> None:
    options = {**PRECOMPUTED, "plugins__dpo__reference": str(models / "other")}
    first = run("first", **options)
    (file,) = (tmp_path / "cache").glob("*/values.npy")
    held = np.load(file)
    held[3] += 1.0
    np.save(file, held)
    second = run("second", **options)
    assert_same(second, first)
    assert sources(tmp_path / "second") == ["computed before the first step"]
    assert '"index_cache.damaged"' in (tmp_path / "second" / "log.jsonl").read_text()


def test_a_run_in_two_halves_is_the_run_in_one(run: Job, models: Path, tmp_path: Path) -> None:
    """Also if the first half had the reference beside it, and if the cache is lost."""
    other = {"plugins__dpo__reference": str(models / "other")}
    saved = {**other, "checkpoint__save_interval": 2}
    straight = run("straight", 2, **other, **PRECOMPUTED)
    for name, first in (("halves", PRECOMPUTED), ("from live", {})):
        run(name, 2, **saved, **first, train__train_iters=2)
        assert_same(run(name, 2, **saved, **PRECOMPUTED), straight)
    run("lost", 2, **saved, **PRECOMPUTED, train__train_iters=2)
    shutil.rmtree(tmp_path / "cache")
    assert_same(run("lost", 2, **saved, **PRECOMPUTED), straight)
    with pytest.raises(Exception, match="cannot resume beside another model"):
        run("lost", 2, **PRECOMPUTED, train__train_iters=STEPS + 1)


def test_rows_of_several_samples_differ_by_rounding(run: Job, models: Path, tmp_path: Path) -> None:
    other = {"plugins__dpo__reference": str(models / "other"), "train__micro_batch_size": 4}
    (live,) = run("live", **other)
    (ahead,) = run("ahead", **other, **PRECOMPUTED)
    for one, two in zip(live.readings, ahead.readings, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
