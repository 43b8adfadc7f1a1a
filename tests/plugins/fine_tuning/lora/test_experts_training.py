"""Full runs with adapters of experts: ten steps against transformers with PEFT, PEFT's files and
merged models, and resuming."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ascend_run.core.checkpoint.store import FileStore
from ascend_run.testing.pool import GlooPool
from tests.core.train.runs import assert_the_same_in_two_halves, whole_run
from tests.support.loaded_model import largest_difference
from tests.support.task_runs import STEPS

from . import peft_runs
from .merged_models import convert, written_as_exported
from .peft_models import logits_of, peft_model, read_peft, trained, write_mixtral, write_peft
from .peft_runs import assert_trained_adapter, train_with_peft, write_conversations
from .test_experts import ATTENTION, BOTH, OURS

RANKS: Final = {BOTH[1]: 2}
EP: Final = {"parallel__expert_model_parallel_size": 2, "train__micro_batch_size": 2}


@attrs.frozen
class TrainedRun:
    """A run of ten steps, with what it started from."""

    workplace: Path
    losses: list[float]

    @property
    def base(self) -> str:
        return str(self.workplace / "model")

    @property
    def folder(self) -> Path:
        return self.workplace / "run"


def values(workplace: Path, output: Path, **changes: Any) -> Mapping[str, Any]:
    return {
        **peft_runs.values(workplace, output),
        "model.family": "mixtral",
        "model.moe_aux_loss_coeff": 0.0,
        "plugins.lora.target_modules": [*OURS, "experts"],
        "plugins.lora.rank_pattern": {"experts_fc2": 2},
        **{name.replace("__", "."): value for name, value in changes.items()},
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, gloo_pool: GlooPool) -> TrainedRun:
    """Train on two ranks with two experts each, from an adapter of PEFT."""
    folder = tmp_path_factory.mktemp("experts")
    base = write_mixtral(folder / "model", vocab_size=400)
    write_conversations(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft_model(base, targets=ATTENTION, target_parameters=BOTH, rank_pattern=RANKS)
    write_peft(model, folder / "adapter")
    options = values(folder, folder / "run", checkpoint__save_interval=STEPS, **EP)
    ended = gloo_pool.run(whole_run, 2, options, ("lora", "gmm"), timeout=100)
    return TrainedRun(folder, [line["loss"] for line in ended[0].readings])


def test_ten_losses_and_the_exported_adapter_are_those_of_peft(run: TrainedRun) -> None:
    expected, weights = train_with_peft(run.workplace)
    assert run.losses == pytest.approx(expected, rel=1e-5)
    assert max(expected) - min(expected) > 0.1
    assert_trained_adapter(run.folder / "adapter", run.workplace / "adapter", weights)
    keys = FileStore(run.folder / "checkpoints").manifest(STEPS).tensors
    kept = {key for key in keys if key.startswith("model/")}
    assert all(".adapter." in key for key in kept)
    assert sum(".experts.adapter." in key for key in kept) == 2 * 5


def test_peft_reads_the_export_and_merged_models_answer_as_it_does(
    run: TrainedRun, tmp_path: Path
) -> None:
    exported = run.folder / "adapter"
    settings = json.loads((exported / "adapter_config.json").read_text())
    assert settings["target_parameters"] == sorted(BOTH)
    assert settings["target_modules"] == sorted(ATTENTION)
    assert settings["rank_pattern"] == RANKS
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        model = read_peft(run.base, exported)
    stored, held = load_file(exported / "adapter_model.safetensors"), trained(model)
    assert held.keys() == stored.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in stored.items())
    adapted = logits_of(model)
    with model.disable_adapter():
        assert largest_difference(logits_of(model), adapted) > 0.01

    assert convert("--to", "hf", run.folder, tmp_path / "of the run") == 0
    words = ("--adapter", exported, run.base, tmp_path / "of the adapter")
    assert convert("--to", "hf", *words) == 0
    for name in ("of the adapter", "of the run"):
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert largest_difference(logits_of(merged), adapted) < 1e-5, name

    written_as_exported(run.folder, tmp_path / "written")


@pytest.mark.exhaustive(by=lambda precision: [precision == "fp32"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_in_two_halves_is_the_run_in_one(
    gloo_pool: GlooPool, run: TrainedRun, tmp_path: Path, precision: str
) -> None:
    def trained_for(name: str, **changes: Any) -> Any:
        options = values(
            run.workplace,
            tmp_path / name,
            train__precision=precision,
            plugins__sft__shuffle=True,
            **EP,
            **changes,
        )
        return gloo_pool.run(whole_run, 2, options, ("lora",), timeout=100)

    assert_the_same_in_two_halves(trained_for, 4, 2)
