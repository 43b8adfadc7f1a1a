"""Adapters of shared experts, against PEFT's on transformers' DeepSeek and in layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from ascend_run.testing.pool import GlooPool
from ascend_run.testing.tensors import differences, full_tensors
from tests.core.train.runs import Runs, whole_run, write_tokens
from tests.support.latent_models import MODEL
from tests.support.loaded_model import largest_difference, loaded_gradients

from .lora_jobs import base_values, hf_names, run_once
from .peft_models import (
    EVERY,
    LATENT,
    every_linear_is_one,
    peft_model,
    read_peft,
    trained,
    write_latent,
    write_peft,
)
from .test_convert import convert
from .test_latent import adapters_alone

TOLERANCE: Final = 1e-5
NO_BALANCE: Final = {"model__moe_aux_loss_coeff": 0.0}
MLP: Final = EVERY[4:]
SHARED: Final = tuple(f"mlp.shared_experts.{name}" for name in MLP)
GATE, UP, DOWN = SHARED
PATTERNS: Final = {
    "rank_pattern": {GATE: 2, "mlp.gate_proj": 3, "up_proj": 5},
    "alpha_pattern": {"shared_experts.*": 9, "mlp.down_proj": 7},
}
SAME: Final = {
    "rank_pattern": {"shared_experts_fc1_gate": 2, "linear_fc1_gate": 3, "linear_fc1_up": 5},
    "alpha_pattern": {"shared_experts": 9.0, "linear_fc2": 7.0},
}
CASES: Final[dict[str, tuple[str, tuple[str, ...], dict[str, Any], dict[str, Any]]]] = {
    "every linear": ("deepseek_v2", (*LATENT, *MLP), {}, {"target_modules": ["all-linear"]}),
    "of V3": ("deepseek_v3", SHARED, {}, {"target_modules": ["shared_experts"]}),
    "one of each": (
        "deepseek_v2",
        (UP, "down_proj"),
        {"use_rslora": True},
        {"target_modules": ["shared_experts_fc1_up", "linear_fc2"], "rslora": True},
    ),
    "own ranks": (
        "deepseek_v2",
        MLP,
        PATTERNS,
        {"target_modules": ["linear_fc1", "linear_fc2"], **SAME},
    ),
    "magnitudes": (
        "deepseek_v2",
        (GATE, DOWN),
        {"use_dora": True},
        {"target_modules": ["shared_experts_fc1_gate", "shared_experts_fc2"], "dora": True},
    ),
}


def write_models(folder: Path, family: str, targets: Any, **options: Any) -> tuple[str, str, Any]:
    """Write a base and an adapter of PEFT; return their folders and the adapted model."""
    base = write_latent(folder / "base", family)
    with every_linear_is_one():
        model = peft_model(base, targets=targets, **options)
    return base, write_peft(model, folder / "adapter"), model


def values_of(base: str, adapter: str | None, family: str, ours: dict[str, Any]) -> dict[str, Any]:
    return {
        **base_values(base, adapter, model__family=family, **NO_BALANCE),
        **{f"plugins.lora.{name}": value for name, value in ours.items()},
    }


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
@pytest.mark.exhaustive(by=lambda case: [case in ("every linear", "own ranks")])
@pytest.mark.parametrize("case", CASES)
def test_logits_and_every_gradient_are_those_of_peft(
    gloo_pool: GlooPool, batch: tuple[Tensor, Tensor], tmp_path: Path, case: str
) -> None:
    """The first layer is dense."""
    family, targets, theirs, ours = CASES[case]
    base, adapter, model = write_models(tmp_path, family, targets, **theirs)
    tokens, labels = batch
    logits = model(input_ids=tokens).logits
    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    values = values_of(base, adapter, family, ours)
    merges = "dora" not in ours  # merged norms lose the sign of random magnitudes
    (outcome,) = gloo_pool.run(run_once, 1, values, tokens, labels, merges=merges)

    assert largest_difference(outcome.logits_BSV, logits.detach()) < TOLERANCE
    found = {name: p.grad for name, p in trained(model).items()}
    expected = {name.replace("_vector.weight", "_vector"): grad for name, grad in found.items()}
    gradients = hf_names(outcome.gradients)
    assert gradients.keys() == expected.keys()
    assert any(".shared_experts." in name for name in gradients)
    for name, gradient in gradients.items():
        assert largest_difference(gradient, expected[name]) < TOLERANCE, name
    assert sorted(outcome.trained) == sorted(outcome.gradients), "nothing else is trained"
    with torch.no_grad(), model.disable_adapter():
        plain = model(input_ids=tokens).logits
    assert largest_difference(plain, logits.detach()) > 0.01, "the adapters count"
    if outcome.merged_logits_BSV is not None:
        assert largest_difference(outcome.merged_logits_BSV, logits.detach()) < TOLERANCE


TP: Final = {"parallel.tensor_model_parallel_size": 2}
SP: Final = {**TP, "parallel.sequence_parallel": True}
EP: Final = {"parallel.expert_model_parallel_size": 2}
OVERLAP: Final = {
    "model.moe_token_dispatcher_type": "alltoall",
    "model.moe_shared_expert_overlap": True,
}
DORA: Final = {"plugins.lora.dora": True}
LAYOUTS: Final[dict[str, tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]]] = {
    "tp=2 sp": ((), SP, {}),
    "ep=2": ((), EP, {}),
    "pp=2": ((), {"parallel.pipeline_model_parallel_size": 2}, {}),
    "tp=2 sp overlapped": ((), {**SP, **OVERLAP}, {}),
    "tp=2 sp overlapped, magnitudes": ((), {**SP, **OVERLAP}, DORA),
    "tp=2 sp cc-lora": (("cc-lora",), SP, {}),
    "tp=2 sp cc-lora overlapped": (("cc-lora",), {**SP, **OVERLAP}, {}),
    "ep=2 overlapped": ((), {**EP, **OVERLAP}, {}),
    "tp=2 sp fused-mlp": (("fused-mlp",), SP, {}),
}


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
@pytest.mark.exhaustive(by=lambda layout: [layout.partition(",")[0]])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_a_layout_are_those_of_one_rank(
    gloo_pool: GlooPool, batch: tuple[Tensor, Tensor], tmp_path: Path, layout: str
) -> None:
    """Every adapter's, in float64."""
    beside, config, options = LAYOUTS[layout]
    sizes, ours = ({"use_dora": True}, {}) if options else (PATTERNS, SAME)
    base, adapter, _ = write_models(tmp_path, "deepseek_v2", (*LATENT, *MLP), **sizes)
    values = {
        **values_of(base, adapter, "deepseek_v2", ours),
        **options,
        "train.global_batch_size": 2,
    }
    plain, cut = (
        [each for (each,) in gloo_pool.run(loaded_gradients, ranks, [run], *batch)]
        for ranks, run in (
            (1, (values, ("lora",))),
            (2, ({**values, **config}, ("lora", *beside))),
        )
    )
    got, want = full_tensors(adapters_alone(cut)), full_tensors(adapters_alone(plain))
    assert got.problems(1e-10) == []
    assert list(differences(got.tensors, want.tensors, 1e-10)) == []
    assert sum(".shared_experts." in name for name in want.tensors) == (8 if options else 5)
    assert all(tensor.any() for tensor in want.tensors.values())


@pytest.fixture(scope="module")
def run(gloo_pool: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train on two tensor-parallel ranks; return the folder of the base and the run."""
    folder = tmp_path_factory.mktemp("shared")
    base = write_latent(folder / "base", "deepseek_v2")
    ours = {"target_modules": ["linear_q_up_proj", "shared_experts"], **RANKS}
    values = {
        **values_of(base, None, "deepseek_v2", ours),
        **SP,
        "run.output_dir": str(folder / "run"),
        "data.train": [write_tokens(folder / "tokens", 61, 40, 1)],
        "train.train_iters": 3,
        "train.global_batch_size": 2,
        "optimizer.lr": 0.05,
        "checkpoint.save_interval": 3,
    }
    gloo_pool.run(whole_run, 2, values, ("lora",), timeout=100)
    return folder


RANKS: Final = {
    "rank_pattern": {"shared_experts_fc1_up": 2},
    "alpha_pattern": {"shared_experts": 3.0},
}


def test_peft_reads_a_run_and_every_merge_is_its(
    run: Path, batch: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    exported = run / "run/adapter"
    settings = json.loads((exported / "adapter_config.json").read_text())
    shared = [name.removeprefix("mlp.") for name in SHARED]
    assert settings["target_modules"] == sorted(["q_b_proj", *shared])
    assert settings["rank_pattern"] == {"up_proj": 2}
    assert settings["alpha_pattern"] == {"down_proj": 3, "gate_proj": 3, "up_proj": 3}
    stored = load_file(exported / "adapter_model.safetensors")
    assert len(stored) == 2 * (2 + 3)
    assert convert("--to", "peft", run / "run", tmp_path / "written") == 0
    for folder in (exported, tmp_path / "written"):
        with every_linear_is_one():
            model = read_peft(run / "base", folder)
        held = trained(model)
        assert held.keys() == stored.keys()
        assert all(torch.equal(held[name], tensor) for name, tensor in stored.items())
        with torch.no_grad():
            adapted = model(input_ids=batch[0]).logits
            with model.disable_adapter():
                assert largest_difference(model(input_ids=batch[0]).logits, adapted) > 0.01

        assert convert("--to", "hf", run / "run", tmp_path / f"{folder.name} run") == 0
        words = ("--adapter", folder, run / "base", tmp_path / f"{folder.name} by convert")
        assert convert("--to", "hf", *words) == 0
        for end in ("run", "by convert"):
            merged = AutoModelForCausalLM.from_pretrained(tmp_path / f"{folder.name} {end}")
            with torch.no_grad():
                logits = merged(input_ids=batch[0]).logits
            assert largest_difference(logits, adapted) < TOLERANCE, end


@pytest.mark.exhaustive(by=lambda ranks: [])
@pytest.mark.parametrize("ranks", [SP, EP], ids=["tp=2 sp", "ep=2"])
def test_a_run_in_two_halves_is_the_run_in_one(
    gloo_pool: GlooPool, tmp_path: Path, ranks: dict[str, Any]
) -> None:
    small = {"plugins.lora.dropout": 0.2, "train.global_batch_size": 2}
    runs = Runs(gloo_pool, tmp_path, ({**MODEL, **small, **ranks}, 2, ("lora",)))
    runs.assert_the_same_in_two_halves()
