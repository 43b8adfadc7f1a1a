"""The key of precomputed log-probabilities: all that their bits depend on, and nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ascend_run.core.config.layout import layout_of
from ascend_run.plugin_api import RoleSpec
from ascend_run.plugins.tasks.dpo.cached_reference import facts_of
from tests.support.needed_plugins import case
from tests.support.preference_files import write_pairs
from tests.support.small_runs import prepare
from tests.support.task_runs import run_values
from tests.support.tiny_llama import write_llama

TP = {"parallel.tensor_model_parallel_size": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_pairs(tmp_path_factory.mktemp("facts"), 4)
    write_llama(folder / "model")
    write_llama(folder / "other", seed=1)
    return folder


def facts(
    folder: Path,
    changes: Mapping[str, Any] | None = None,
    *,
    enable: Sequence[str] = (),
    world_size: int = 1,
    is_base: bool = False,
    samples: str = "samples",
) -> Mapping[str, object]:
    """Return what the log-probabilities of a run's reference are found by; its weights are those of
    the folder ``other``."""
    values = {**run_values("dpo", folder, folder / "run"), **(changes or {})}
    config = prepare(values, enable, world_size).run_request().config
    context: Any = SimpleNamespace(
        config=config,
        layout=layout_of(config, world_size),
        models={"reference": SimpleNamespace(weights=str(folder / "other"))},
    )
    data: Any = SimpleNamespace(samples=SimpleNamespace(digest=lambda: samples))
    return facts_of(context, RoleSpec(name="reference", is_base=is_base), data)


@pytest.mark.parametrize(
    "changes",
    [
        {"model.rotary_base": 5000.0},
        {"train.precision": "bf16"},
        {"train.loss_chunk_bytes": 4096},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_options_of_the_model_and_its_numbers_count(
    folder: Path, changes: Mapping[str, Any]
) -> None:
    assert facts(folder, changes) != facts(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer.lr": 0.5},
        {"train.train_iters": 3, "train.global_batch_size": 2},
        {"plugins.dpo.beta": 0.5, "plugins.dpo.shuffle": True},
        {"run.seed": 3},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_options_of_the_training_do_not(folder: Path, changes: Mapping[str, Any]) -> None:
    assert facts(folder, changes) == facts(folder)


def test_samples_and_whether_it_is_the_base_count(folder: Path) -> None:
    assert facts(folder, samples="others") != facts(folder)
    own = {"model.hf_path": str(folder / "other")}  # the weights are the same
    assert facts(folder, own, is_base=True) != facts(folder, own)


def test_tensor_parallel_ranks_count_and_data_parallel_ones_do_not(folder: Path) -> None:
    """The former sum in another order; the latter share the samples only."""
    assert facts(folder, TP, world_size=2) != facts(folder)
    assert facts(folder, TP, world_size=4) == facts(folder, TP, world_size=2)
    assert facts(folder, world_size=2) == facts(folder)


@pytest.mark.parametrize("enable", [case(("rms-norm",)), case(("matmul-add",))], ids=str)
def test_other_plugins_count(folder: Path, enable: Sequence[str]) -> None:
    """The second has no options."""
    assert facts(folder, enable=enable) != facts(folder)


@pytest.mark.needs_plugins("rms-norm")
def test_options_of_other_plugins_count(folder: Path) -> None:
    torchs = {"plugins.rms-norm.kernel": "torch"}
    assert facts(folder, torchs, enable=["rms-norm"]) != facts(folder, enable=["rms-norm"])


def test_weights_count_by_their_content(folder: Path, tmp_path: Path) -> None:
    """Not by their folder's name."""
    for name in ("model", "other", "tokenizer"):
        shutil.copytree(folder / name, tmp_path / name)
    shutil.copy(folder / "train.jsonl", tmp_path)
    assert facts(tmp_path) == facts(folder)
    shutil.copy(folder / "model" / "model.safetensors", tmp_path / "other")
    assert facts(tmp_path) != facts(folder)
