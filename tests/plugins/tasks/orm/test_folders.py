"""Reward models as Hugging Face folders: what a run begins with, and what it becomes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from ascend_run.testing.pool import GlooPool
from ascend_run.tools.convert.command import command as convert
from tests.core.train.runs import whole_run
from tests.support.plain_rewards import scorer, write_scorer
from tests.support.preference_files import write_models_and_pairs

from .test_training import values


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_models_and_pairs(tmp_path_factory.mktemp("orm"), 8)
    write_scorer(folder / "model-scorer", folder / "model")
    write_scorer(folder / "three", folder / "model", num_labels=3)
    return folder


def run(gloo_pool: GlooPool, models: Path, output: Path, ranks: int, **changes: Any) -> Any:
    steps = {"train__train_iters": 2, "checkpoint__save_interval": 2, "train__eval_interval": 0}
    options = values(models, output, **steps, **changes)
    return gloo_pool.run(whole_run, ranks, options, timeout=100)


def converted(*words: str | Path) -> None:
    code = convert.main([str(word) for word in words], standalone_mode=False)
    assert code == 0


TP_PP = {
    "parallel__tensor_model_parallel_size": 2,
    "parallel__pipeline_model_parallel_size": 2,
}


def test_an_export_is_read_by_transformers(
    gloo_pool: GlooPool, models: Path, tmp_path: Path
) -> None:
    """What two ranks of each kind trained, from a folder with an output layer."""
    ended = run(
        gloo_pool, models, tmp_path / "run", 4, model__hf_path=str(models / "model"), **TP_PP
    )
    converted("--to", "hf", "--verify", "tensors", tmp_path / "run", tmp_path / "hf")
    keys = json.loads((tmp_path / "hf/config.json").read_text())
    assert keys["architectures"] == ["LlamaForSequenceClassification"]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    assert model.config.num_labels == 1
    tensors = {name: tensor for rank in ended for name, tensor in rank.tensors.items()}
    (head,) = (t for name, t in tensors.items() if name.startswith("model/score.weight"))
    assert torch.equal(model.score.weight.detach(), head)
    assert head.std() < 0.1  # drawn like other weights, and trained for two steps
    stored = load_file(tmp_path / "hf/model.safetensors")
    assert "lm_head.weight" not in stored

    # One rank resumes from it, and transformers reads what that trained.
    again = run(gloo_pool, models, tmp_path / "again", 1, model__hf_path=str(tmp_path / "hf"))
    converted("--to", "hf", tmp_path / "again", tmp_path / "hf again")
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        score = scorer(tmp_path / "hf again")(input_ids=ids).logits
    assert again[0].readings[0]["loss"] > 0
    assert torch.isfinite(score).all()


def test_a_folder_becomes_a_checkpoint_and_a_folder_again(models: Path, tmp_path: Path) -> None:
    converted("--from", "hf", "--to", "ascend-run", models / "model-scorer", tmp_path / "run")
    converted("--to", "hf", tmp_path / "run", tmp_path / "hf")
    one, other = (
        load_file(folder / "model.safetensors")
        for folder in (models / "model-scorer", tmp_path / "hf")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        scores = [
            scorer(folder)(input_ids=ids).logits
            for folder in (models / "model-scorer", tmp_path / "hf")
        ]
    torch.testing.assert_close(*scores, rtol=0, atol=1e-5)


def test_a_head_of_other_labels_is_refused(
    gloo_pool: GlooPool, models: Path, tmp_path: Path
) -> None:
    with pytest.raises(Exception, match=r"orm: model\.num_labels=3, and a reward is 1 score"):
        run(gloo_pool, models, tmp_path / "run", 1, model__hf_path=str(models / "three"))
    with pytest.raises(Exception, match=r"score\.weight is \[3, 32\], expected \[1, 32\]"):
        run(
            gloo_pool,
            models,
            tmp_path / "set",
            1,
            model__hf_path=str(models / "three"),
            model__num_labels=1,
        )
