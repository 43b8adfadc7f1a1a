"""A score head is trained in full beside adapters, against PEFT's models for ``SEQ_CLS``."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from ascend_run.ops.preference_loss import REWARDS
from ascend_run.testing.hugging_face.widened import computing_in
from ascend_run.testing.pool import GlooPool
from tests.core.train.runs import Ended, assert_the_same_in_two_halves, whole_run
from tests.support.costs import planned
from tests.support.loaded_model import largest_difference
from tests.support.needed_plugins import case
from tests.support.plain_rewards import PlainRewards, write_scorer
from tests.support.preference_files import assert_equal_steps, tokenized, write_models_and_pairs
from tests.support.task_runs import BATCH, STEPS, batches_of, ten_steps
from tests.support.tiny_llama import write_llama

from .lora_jobs import gradients_of_step, hf_names
from .merged_models import convert, written_as_exported
from .peft_models import ALPHA, RANK, in_float64, peft_model, read_peft, trained, write_peft
from .peft_runs import assert_trained_adapter
from .test_rules import problems, write_header

pytestmark = pytest.mark.needs_plugins("orm")
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model that predicts tokens, pairs, and PEFT's adapter with a score head."""
    folder = write_models_and_pairs(tmp_path_factory.mktemp("scores"), STEPS * BATCH)
    write_peft(peft_model(folder / "model", num_labels=1), folder / "adapter")
    return folder


def values(models: Path, output: Path, **changes: Any) -> dict[str, Any]:
    of_adapters = {
        "plugins__lora__rank": RANK,
        "plugins__lora__alpha": float(ALPHA),
        "plugins__lora__load": str(models / "adapter"),
    }
    return ten_steps("orm", models, output, **{**of_adapters, **changes})


@attrs.frozen
class Trained:
    """Ten steps of a run from PEFT's adapter."""

    folder: Path
    ended: Ended


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"train__micro_batch_size": 2}),
    "tp=2 sp": (
        2,
        {"parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": True},
    ),
    "pp=2": (2, {"parallel__pipeline_model_parallel_size": 2}),
    "dp=2": (2, {"ddp__use_distributed_optimizer": True}),
}
Runs = Callable[[str], Trained]


@pytest.fixture(scope="module")
def runs(gloo_pool: GlooPool, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return the run in a layout, which is there once."""

    @functools.cache
    def run(layout: str) -> Trained:
        folder = tmp_path_factory.mktemp("run")
        ranks, changes = LAYOUTS[layout]
        given = values(models, folder, checkpoint__save_interval=STEPS, **changes)
        ended = gloo_pool.run(whole_run, ranks, given, ("lora",), timeout=100)
        return Trained(folder, ended[0])

    return run


@pytest.fixture(scope="module")
def reference(models: Path) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Return the steps of PEFT's model, and what it has trained."""
    pairs = tokenized(models / "blocks", models / "train.jsonl")
    model = read_peft(models / "model", models / "adapter", num_labels=1).eval()
    steps = [*PlainRewards(model=model).steps(batches_of(pairs))]
    return steps, {name: p.detach().clone() for name, p in trained(model).items()}


@pytest.mark.exhaustive(by=lambda layout: [layout] if layout == "one" else [])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ten_steps_and_the_exported_adapter_are_those_of_peft(
    models: Path,
    runs: Runs,
    reference: tuple[list[dict[str, float]], dict[str, Tensor]],
    layout: str,
) -> None:
    run = runs(layout)
    steps, weights = reference
    assert_equal_steps(run.ended.readings, steps, REWARDS)
    assert steps[-1]["loss"] < 0.9 * steps[0]["loss"]
    assert "base_model.model.score.weight" in weights
    assert_trained_adapter(run.folder / "adapter", models / "adapter", weights)
    settings = json.loads((run.folder / "adapter/adapter_config.json").read_text())
    assert settings["task_type"] == "SEQ_CLS"
    assert settings["modules_to_save"] == ["score"]


def test_each_gradient_is_that_of_peft(gloo_pool: GlooPool, models: Path, tmp_path: Path) -> None:
    pairs = tokenized(models / "blocks", models / "train.jsonl")[:BATCH]
    model = in_float64(read_peft(models / "model", models / "adapter", num_labels=1))
    with computing_in(torch.float64):
        PlainRewards(model=model).backward(pairs)
    (found,) = gloo_pool.run(gradients_of_step, 1, values(models, tmp_path), timeout=100)
    gradients, wanted = hf_names(found), trained(model)
    assert gradients.keys() == wanted.keys()
    assert "base_model.model.score.weight" in gradients
    for name, parameter in wanted.items():
        assert parameter.grad is not None
        assert gradients[name].dtype is torch.float64
        difference = (gradients[name] - parameter.grad).abs().max()
        assert difference < 1e-10 * parameter.grad.abs().max(), name


def scores_of(model: Any) -> Tensor:
    """Return scores of fixed tokens, [4, 1]."""
    tokens = torch.randint(300, (4, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return torch.cat([model.eval()(input_ids=row[None]).logits for row in tokens])


def merged_by(folder: Path, *words: str | Path) -> Any:
    """Convert to a folder, and read it as transformers does, with every weight."""
    assert convert("--to", "hf", *words, folder) == 0
    model, info = AutoModelForSequenceClassification.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(info.values()), info
    return model


def test_exports_have_the_scores_that_peft_computes(
    models: Path, runs: Runs, tmp_path: Path
) -> None:
    """Read by PEFT, and merged: of the run, and of adapters beside bases of both kinds."""
    run = runs("one")
    adapted = read_peft(models / "model", run.folder / "adapter", num_labels=1)
    wanted = scores_of(adapted)
    with adapted.disable_adapter():
        assert largest_difference(scores_of(adapted), wanted) > 0.01, "the adapter counts"
    found = merged_by(tmp_path / "of the run", run.folder)
    assert largest_difference(scores_of(found), wanted) < TOLERANCE
    words = ("--adapter", run.folder / "adapter", models / "model")
    found = merged_by(tmp_path / "of the adapter", *words)
    assert largest_difference(scores_of(found), wanted) < TOLERANCE
    scorer = write_scorer(tmp_path / "scorer", models / "model")
    found = merged_by(tmp_path / "of PEFT's", "--adapter", models / "adapter", scorer)
    wanted = scores_of(read_peft(models / "model", models / "adapter", num_labels=1))
    assert largest_difference(scores_of(found), wanted) < TOLERANCE
    written_as_exported(run.folder, tmp_path / "written")


@pytest.mark.exhaustive(by=lambda plugins: [] if "qlora" in plugins else ["lora"])
@pytest.mark.parametrize("plugins", [case(("lora",)), case(("lora", "qlora"))])
def test_a_run_in_two_halves_is_the_run_in_one(
    gloo_pool: GlooPool, models: Path, tmp_path: Path, plugins: tuple[str, ...]
) -> None:
    """From a head that begins at random, which the checkpoint has; then merged."""

    def run(name: str, **changes: Any) -> Any:
        given = values(
            models,
            tmp_path / name,
            plugins__lora__load=None,
            plugins__lora__dropout=0.2,
            plugins__orm__shuffle=True,
            **changes,
        )
        return gloo_pool.run(whole_run, 1, given, plugins, timeout=100)

    straight = assert_the_same_in_two_halves(run, 4, 2)
    kept = [name for name in straight[0].tensors if "score" in name]
    assert len(kept) == 4, kept  # the weight, its master copy, and Adam's two moments
    merged = merged_by(tmp_path / "merged", tmp_path / "halves")
    (head,) = (t for name, t in straight[0].tensors.items() if name.startswith("model/score."))
    assert torch.equal(merged.score.weight, head)


def test_a_tied_embedding_has_no_copy_beside_a_head(
    gloo_pool: GlooPool, models: Path, tmp_path: Path
) -> None:
    """There is no output layer to be tied to it, in the files of a run or of the command."""
    write_llama(models / "tied", tie_word_embeddings=True, max_position_embeddings=256)
    given = values(
        models,
        tmp_path / "run",
        model="tied",
        plugins__lora__load=None,
        plugins__lora__modules_to_save=["word_embeddings"],
        train__train_iters=1,
        checkpoint__save_interval=1,
    )
    gloo_pool.run(whole_run, 1, given, ("lora",), timeout=100)
    settings = written_as_exported(tmp_path / "run", tmp_path / "written")
    assert settings["modules_to_save"] == ["model.embed_tokens", "score"]
    assert not settings["ensure_weight_tying"]
    names = load_file(tmp_path / "written/adapter_model.safetensors").keys()
    ends = {"model.embed_tokens.weight", "score.weight"}
    assert {name for name in names if ".lora_" not in name} == {
        f"base_model.model.{end}" for end in ends
    }
    merged = merged_by(tmp_path / "merged", tmp_path / "run")
    wanted = scores_of(read_peft(models / "tied", tmp_path / "run/adapter", num_labels=1))
    assert largest_difference(scores_of(merged), wanted) < TOLERANCE


def test_the_plan_counts_what_peft_trains(
    models: Path, reference: tuple[list[dict[str, float]], dict[str, Tensor]], tmp_path: Path
) -> None:
    _, (cost,) = planned(values(models, tmp_path), ("lora",))
    assert cost.trained_parameters == sum(one.numel() for one in reference[1].values())


HEAD = {"num_labels": 1}


def test_an_output_layer_is_refused_where_there_is_none() -> None:
    (problem,) = problems({"modules_to_save": ("output_layer",)}, **HEAD)
    assert problem == (
        "lora: plugins.lora.modules_to_save names 'output_layer', in whose place this model has a "
        "score head (model.num_labels=1), which is always trained in full; leave the name out"
    )
    assert problems({"modules_to_save": ("score",)}, **HEAD) == []
    (problem,) = problems({"modules_to_save": ("score",)})
    assert "names 'score'; expected some of word_embeddings, output_layer" in problem


def test_a_head_on_one_side_alone_is_refused(models: Path, tmp_path: Path) -> None:
    scored = str(models / "adapter")
    options = {"rank": RANK, "alpha": float(ALPHA), "load": scored}
    assert problems(options, num_layers=2, **HEAD) == []
    (problem,) = problems(options, num_layers=2)
    assert f"{scored} has a score head, and this model predicts tokens" in problem
    plain = write_header(tmp_path / "plain")
    (problem,) = problems({"load": plain}, **HEAD)
    assert f"{plain} has no score head, and this model has one (model.num_labels=1)" in problem
