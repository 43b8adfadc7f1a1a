"""A merged export answers as the base with its adapter does in PEFT, after preferences are
learned."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ascend_run.testing.pool import GlooPool
from tests.core.train.runs import whole_run
from tests.support.loaded_model import largest_difference
from tests.support.preference_files import write_models_and_pairs

from .merged_models import convert
from .peft_models import logits_of

TOLERANCE = 1e-5
BASE = {"plugins.dpo.reference": "base"}
CASES: dict[str, dict[str, Any]] = {
    "lora": BASE,
    "rslora": {**BASE, "plugins.lora.rslora": True, "plugins.lora.rank_pattern": {"linear_v": 2}},
    "dora": {**BASE, "plugins.lora.dora": True},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_models_and_pairs(tmp_path_factory.mktemp("exports"), 8)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16)
    model.save_pretrained(folder / "bf16")
    return folder


def read_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def with_adapter(base: Path, adapter: Path) -> Any:
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(read_model(base), adapter)


def trained_and_merged(pool: GlooPool, models: Path, folder: Path, base: str, case: str) -> None:
    """Write the run's adapter, its merged export, and the merged adapter."""
    from tests.plugins.tasks.dpo.test_training import values

    run = {
        **values(models, folder / "run", model__hf_path=str(models / base)),
        **CASES[case],
        "train.train_iters": 2,
        "optimizer.lr": 0.02,
        "checkpoint.save_interval": 2,
        "plugins.lora.rank": 4,
    }
    pool.run(whole_run, 1, run, ("lora",), timeout=100)
    assert convert("--to", "hf", folder / "run", folder / "of the run") == 0
    words = ("--adapter", folder / "run/adapter", models / base, folder / "of the adapter")
    assert convert("--to", "hf", *words) == 0


@pytest.mark.needs_plugins("dpo")
@pytest.mark.parametrize("case", CASES)
def test_merged_logits_are_those_of_the_base_and_its_adapter(
    gloo_pool: GlooPool, models: Path, tmp_path: Path, case: str
) -> None:
    trained_and_merged(gloo_pool, models, tmp_path, "model", case)
    model = with_adapter(models / "model", tmp_path / "run/adapter")
    adapted = logits_of(model)
    for name in ("of the run", "of the adapter"):
        assert largest_difference(logits_of(read_model(tmp_path / name)), adapted) < TOLERANCE
    with model.disable_adapter():
        assert largest_difference(logits_of(model), adapted) > 0.01
    unloaded = model.merge_and_unload()
    assert largest_difference(logits_of(unloaded), adapted) < TOLERANCE


@pytest.mark.needs_plugins("dpo")
@pytest.mark.parametrize("case", CASES)
def test_bf16_weights_are_merged_with_one_rounding(
    gloo_pool: GlooPool, models: Path, tmp_path: Path, case: str
) -> None:
    """Against PEFT's merge in float64: half a unit in the last place is 2**-8 of a number."""
    trained_and_merged(gloo_pool, models, tmp_path, "bf16", case)
    exact = with_adapter(models / "bf16", tmp_path / "run/adapter").double().merge_and_unload()
    wanted = exact.state_dict()
    rounded = logits_of(copy.deepcopy(exact).bfloat16().float())
    for name in ("of the run", "of the adapter"):
        stored = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto")
        assert stored.dtype is torch.bfloat16
        for key, weight in stored.state_dict().items():
            error = (weight.double() - wanted[key]).abs()
            assert (error <= wanted[key].abs() * 2**-8 * (1 + 1e-4)).all(), key
        assert largest_difference(logits_of(stored.float()), rounded) < 2**-7
