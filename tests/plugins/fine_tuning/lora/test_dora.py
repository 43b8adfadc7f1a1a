"""Weights decomposed into magnitudes and directions, against PEFT's ``use_dora``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import Trial
from ascend_run.testing.tensors import differences, full_tensors
from tests.core.train.runs import Runs, whole_run
from tests.support.communication import differences as message_differences
from tests.support.costs import planned
from tests.support.loaded_model import largest_difference
from tests.support.tiny_llama import write_llama
from tests.tools.plan.cost_model.cost_jobs import count_flops

from .against_peft import TOLERANCE, assert_is_of_peft, in_files, of_peft
from .lora_jobs import base_values, run_once
from .merged_models import check_each_merge, merged_by_peft, written_as_exported
from .peft_models import EVERY, VOCAB, peft_model, read_peft, trained, write_latent, write_peft
from .peft_runs import (
    assert_trained_adapter,
    train_with_peft,
    values,
    write_conversations,
)
from .test_layouts import CASES as LAYOUTS
from .test_layouts import Trials
from .test_rules import problems, write_header

SIZES: dict[str, Any] = {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"up_proj": 9}}
SAME = {"rank_pattern": {"linear_v": 2}, "alpha_pattern": {"linear_fc1_up": 9.0}}


def dora_model(base: str | Path, **options: Any) -> Any:
    """Build a model of PEFT with random matrices, and magnitudes near the norms of the rows."""
    model = peft_model(base, use_dora=True, **options)
    with torch.no_grad():
        for name, parameter in trained(model).items():
            if "magnitude" in name:
                norms = norms_of(model, name)
                parameter.copy_(norms * (1.0 + 0.2 * torch.rand_like(norms)))
    return model


def norms_of(model: Any, name: str) -> Tensor:
    """Return the norms of the rows of the base's weight."""
    module = name.partition(".lora_magnitude")[0]
    norms: Tensor = model.get_submodule(module).base_layer.weight.detach().norm(dim=1)
    return norms


TARGETS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "all": ("llama", EVERY, ("all-linear",)),
    "some": (
        "llama",
        ("q_proj", "v_proj", "o_proj", "up_proj"),
        ("linear_q", "linear_v", "linear_proj", "linear_fc1_up"),
    ),
    "latents": ("minicpm3", ("q_a_proj", "kv_b_proj"), ("linear_q_down_proj", "linear_kv_up_proj")),
}


@pytest.mark.exhaustive(by=lambda case: [case])
@pytest.mark.parametrize("case", TARGETS)
def test_logits_and_every_gradient_are_those_of_peft(
    gloo_pool: GlooPool, batch: tuple[Tensor, Tensor], tmp_path: Path, case: str
) -> None:
    family, theirs, ours = TARGETS[case]
    if family == "minicpm3":
        base = write_latent(tmp_path / "base", family)
    else:
        base = write_llama(tmp_path / "base", VOCAB)
    sizes = SIZES if case == "all" else {}
    model = dora_model(base, targets=theirs, **sizes)
    adapter = write_peft(model, tmp_path / "adapter")
    run = {
        **base_values(base, adapter, model__family=family),
        "plugins.lora.dora": True,
        "plugins.lora.target_modules": [*ours],
        **({f"plugins.lora.{name}": value for name, value in SAME.items()} if sizes else {}),
    }
    (outcome,) = gloo_pool.run(run_once, 1, run, *batch)
    assert_is_of_peft(outcome, of_peft(model, batch))


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a base model, its tokenizer, conversations and an initial adapter."""
    folder = tmp_path_factory.mktemp("dora")
    base = write_llama(folder / "model")
    write_conversations(folder)
    write_peft(dora_model(base), folder / "adapter")
    return folder


@pytest.fixture(scope="module")
def reference(workplace: Path) -> tuple[list[float], dict[str, Tensor]]:
    losses, weights = train_with_peft(workplace)
    return losses, in_files(weights)


SP = {"parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": True}
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"train__micro_batch_size": 2}),
    "tp=2 sp": (2, SP),
    "pp=2": (2, {"parallel__pipeline_model_parallel_size": 2}),
}


@pytest.mark.exhaustive(by=lambda layout: [RUNS[layout][0] > 1])
@pytest.mark.parametrize("layout", RUNS)
def test_ten_steps_and_the_export_are_those_of_peft(
    gloo_pool: GlooPool,
    workplace: Path,
    reference: tuple[list[float], dict[str, Tensor]],
    tmp_path: Path,
    layout: str,
) -> None:
    ranks, changes = RUNS[layout]
    run = values(workplace, tmp_path, plugins__lora__dora=True, **changes)
    ended = gloo_pool.run(whole_run, ranks, run, ("lora",), timeout=100)
    expected, weights = reference
    losses = [line["loss"] for line in ended[0].readings]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert_trained_adapter(tmp_path / "adapter", workplace / "adapter", weights)


def test_new_magnitudes_are_the_norms_of_the_loaded_weights(
    gloo_pool: GlooPool, workplace: Path, tmp_path: Path
) -> None:
    """At the first step the model is the base, and PEFT reads what no step has changed."""
    changes = {"optimizer__lr": 0.0, "train__train_iters": 1, "plugins__lora__load": None}
    losses = []
    for dora in (False, True):
        run = values(workplace, tmp_path / str(dora), plugins__lora__dora=dora, **changes, **SP)
        (ended, _) = gloo_pool.run(whole_run, 2, run, ("lora",), timeout=100)
        losses.append(ended.readings[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    model = read_peft(workplace / "model", tmp_path / "True/adapter")
    held = {n: p for n, p in trained(model).items() if "magnitude" in n}
    assert len(held) == 14
    for name, magnitude in held.items():
        torch.testing.assert_close(magnitude.detach(), norms_of(model, name), rtol=1e-6, atol=0)


@pytest.mark.parametrize("contents", ["adapters", "full"])
def test_a_run_is_merged_and_written_with_magnitudes(
    gloo_pool: GlooPool, workplace: Path, tmp_path: Path, contents: str
) -> None:
    base = str(workplace / "model")
    run = values(
        workplace,
        tmp_path / "run",
        train__train_iters=3,
        checkpoint__save_interval=3,
        plugins__lora__checkpoint=contents,
        plugins__lora__load=None,
        plugins__lora__dora=True,
        plugins__lora__target_modules=["linear_q", "linear_v", "linear_proj", "linear_fc1_up"],
        optimizer__lr=0.05,
        **SP,
    )
    gloo_pool.run(whole_run, 2, run, ("lora",), timeout=100)
    check_each_merge(tmp_path, base, merged_by_peft(base, tmp_path / "run/adapter"), 8)
    assert written_as_exported(tmp_path / "run", tmp_path / "written")["use_dora"] is True


def with_magnitudes(folder: str) -> None:
    """Add random magnitudes to an adapter in PEFT's format."""
    tensors = load_file(Path(folder) / "adapter_model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for name, b in [*tensors.items()]:
        if name.endswith("lora_B.weight"):
            vector = name.replace("lora_B.weight", "lora_magnitude_vector")
            tensors[vector] = 0.5 + torch.rand(len(b), generator=generator)
    save_file(tensors, Path(folder) / "adapter_model.safetensors")
    settings = json.loads((Path(folder) / "adapter_config.json").read_text())
    text = json.dumps({**settings, "use_dora": True})
    (Path(folder) / "adapter_config.json").write_text(text)


@pytest.fixture(scope="module")
def trials(gloo_pool: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> Trials:
    made = Trials(gloo_pool, tmp_path_factory.mktemp("adapters"))
    for folder in made.adapters.values():
        with_magnitudes(folder)
    return made


CHOSEN = (
    *("tp=2", "tp=2 sp dp=2", "tp=4 sp, two key-value groups", "tp=4, two key-value groups"),
    *("pp=2", "cp=2 tp=2 ulysses", "recompute tp=2 sp", "distributed optimizer"),
    "experts gmm ep=2 tp=2",
)


@pytest.mark.exhaustive(by=lambda case: [LAYOUTS[case][0], "tp=4" in case])
@pytest.mark.parametrize("case", CHOSEN)
def test_every_gradient_is_that_of_one_rank(trials: Trials, case: str) -> None:
    model, layout, beside, config = LAYOUTS[case]
    dora = {"plugins.lora.dora": True}
    got = full_tensors(trials(model, layout, beside, 0, {**config, **dora}))
    want = full_tensors(trials(model, {}, (), 0, dora))
    assert got.problems(1e-10) == []
    assert list(differences(got.tensors, want.tensors, 1e-10)) == []
    vectors = [tensor for name, tensor in want.tensors.items() if "lora_magnitude" in name]
    assert len(vectors) == 2 * (4 if model == "moe" else 7)
    assert all(vector.any() for vector in vectors)


@pytest.mark.exhaustive(by=lambda model: [model] if model == "dense" else [])
@pytest.mark.parametrize("model", ["dense", "moe"])
def test_a_run_in_two_halves_is_the_run_in_one(
    gloo_pool: GlooPool, tmp_path: Path, model: str
) -> None:
    options = {
        "plugins.lora.dora": True,
        "plugins.lora.dropout": 0.2,
        "parallel.tensor_model_parallel_size": 2,
        "parallel.sequence_parallel": True,
    }
    kind = ({**(MOE if model == "moe" else DENSE), **options}, 2, ("lora",))
    Runs(gloo_pool, tmp_path, kind).assert_the_same_in_two_halves()


def test_with_all_inputs_dropped_the_base_is_left(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """As in PEFT, the base's output has no dropout; what magnitudes change of it has."""
    base, tokens = write_llama(tmp_path / "base", VOCAB), torch.arange(16)[None]
    adapter = write_peft(dora_model(base), tmp_path / "adapter")
    options = {"plugins.lora.dora": True, "plugins.lora.dropout": 1.0 - 1e-9}
    run = {**base_values(base, adapter), **options}
    (outcome,) = gloo_pool.run(run_once, 1, run, tokens, tokens)
    plain = {k: v for k, v in base_values(base).items() if not k.startswith("plugins.")}
    (bare,) = gloo_pool.run(run_once, 1, plain, tokens, tokens, ())
    assert largest_difference(outcome.logits_BSV, bare.logits_BSV) < TOLERANCE


def test_the_plan_counts_the_magnitudes(gloo_pool: GlooPool) -> None:
    narrow = {**DENSE, "plugins.lora.rank": 2}
    config = {**narrow, "plugins.lora.dora": True}
    (_, (lora,)), (_, (cost,)) = planned(narrow, ("lora",)), planned(config, ("lora",))
    rows = 2 * (32 + 8 + 8 + 32 + 2 * 48 + 32)
    assert cost.trained_parameters == lora.trained_parameters + rows
    assert cost.parameters == lora.parameters + rows
    (((products, _),), ((matmuls, _),)) = (
        gloo_pool.run(count_flops, 1, Trial(config=each, plugins=("lora",)))
        for each in (config, narrow)
    )
    norms = cost.flops - lora.flops  # of four micro-batches; and once when the model is built
    assert products - matmuls == norms + norms / 4


@pytest.mark.exhaustive(by=lambda ranks: [ranks])
@pytest.mark.parametrize("ranks", [2, 4])
def test_norms_send_what_was_expected(gloo_pool: GlooPool, ranks: int) -> None:
    config = {
        **DENSE,
        "model.kv_channels": 32,
        "data.seq_length": 64,
        "parallel.tensor_model_parallel_size": ranks,
        "parallel.sequence_parallel": True,
        "plugins.lora.dora": True,
    }
    assert message_differences(gloo_pool, config, ("lora",)) == []


def test_an_adapter_with_or_without_magnitudes_says_what_to_set(tmp_path: Path) -> None:
    (found,) = problems({"load": write_header(tmp_path / "dora", use_dora=True)})
    assert "plugins.lora.dora=false, but the adapter in" in found
    assert "has true; set plugins.lora.dora=true" in found
    (found,) = problems({"load": write_header(tmp_path / "plain"), "dora": True})
    assert "has false; set plugins.lora.dora=false" in found
