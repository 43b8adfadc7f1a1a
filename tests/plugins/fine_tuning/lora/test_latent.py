"""Adapters of multi-latent attention, against PEFT's on transformers' models and in layouts."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import RankOutcome
from ascend_run.testing.tensors import differences, full_tensors
from tests.core.train.runs import Runs, whole_run, write_tokens
from tests.support.latent_models import MODEL
from tests.support.loaded_model import largest_difference, loaded_gradients

from .against_peft import TOLERANCE, assert_is_of_peft, of_peft
from .lora_jobs import base_values, run_once
from .merged_models import convert
from .peft_models import (
    LATENT,
    VOCAB,
    peft_model,
    read_peft,
    trained,
    write_latent,
    write_peft,
)

ATTENTION = (
    *("linear_q_down_proj", "linear_q_up_proj"),
    *("linear_kv_down_proj", "linear_kv_up_proj", "linear_proj"),
)
MLP = ("gate_proj", "up_proj", "down_proj")
NO_BALANCE = {"model__moe_aux_loss_coeff": 0.0}
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    "every linear of MiniCPM3": ("minicpm3", {}, (*LATENT, *MLP), ("all-linear",)),
    "the attention of V2": ("deepseek_v2", {}, LATENT, ATTENTION),
    "plain queries of V3": (
        "deepseek_v3",
        {"q_lora_rank": None},
        ("q_proj", "kv_b_proj"),
        ("linear_q_proj", "linear_kv_up_proj"),
    ),
    "down projections of V3": (
        "deepseek_v3",
        {},
        ("q_a_proj", "kv_a_proj_with_mqa"),
        ("linear_q_down_proj", "linear_kv_down_proj"),
    ),
}


@pytest.mark.exhaustive(by=lambda case: [CASES[case][0]])
@pytest.mark.parametrize("case", CASES)
def test_logits_and_every_gradient_are_those_of_peft(
    gloo_pool: GlooPool, batch: tuple[Tensor, Tensor], tmp_path: Path, case: str
) -> None:
    family, changes, theirs, ours = CASES[case]
    base = write_latent(tmp_path / "base", family, **changes)
    model = peft_model(base, targets=theirs)
    adapter = write_peft(model, tmp_path / "adapter")
    values = base_values(
        base, adapter, model__family=family, plugins__lora__target_modules=[*ours], **NO_BALANCE
    )
    (outcome,) = gloo_pool.run(run_once, 1, values, *batch)
    assert_is_of_peft(outcome, of_peft(model, batch))


def adapters_alone(outcomes: Sequence[RankOutcome]) -> list[RankOutcome]:
    """Leave out the shards of what is frozen, which has no gradient."""
    trained = [tuple(s for s in one.shards if ".adapter." in s.name) for one in outcomes]
    frozen = [s for one in outcomes for s in one.shards if ".adapter." not in s.name]
    assert all(shard.tensor is None for shard in frozen)
    return [attrs.evolve(one, shards=shards) for one, shards in zip(outcomes, trained, strict=True)]


TP = {"parallel.tensor_model_parallel_size": 2}
SP = {**TP, "parallel.sequence_parallel": True}
PATTERNS = {
    "rank_pattern": {"q_b_proj": 2, "up_proj": 6},
    "alpha_pattern": {"q_b_proj": 5, "o_proj": 3},
}
SAME = {
    "plugins.lora.rank_pattern": {"linear_q_up_proj": 2, "linear_fc1_up": 6},
    "plugins.lora.alpha_pattern": {"linear_q_up_proj": 5.0, "linear_proj": 3.0},
}
"""The same in a run."""
LAYOUTS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "tp=2": ("minicpm3", (*LATENT, *MLP), TP),
    "tp=2 sp": ("minicpm3", (*LATENT, *MLP), SP),
    "tp=2 sp, experts": ("deepseek_v2", LATENT, SP),
}


@pytest.mark.exhaustive(by=lambda layout: [LAYOUTS[layout][2] is SP])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_under_tensor_parallelism_are_those_of_one_rank(
    gloo_pool: GlooPool, batch: tuple[Tensor, Tensor], tmp_path: Path, layout: str
) -> None:
    """Every adapter's, in float64."""
    family, theirs, config = LAYOUTS[layout]
    base = write_latent(tmp_path / "base", family)
    patterns = {} if theirs is LATENT else PATTERNS
    adapter = write_peft(peft_model(base, targets=theirs, **patterns), tmp_path / "adapter")
    ours = [*ATTENTION] if theirs is LATENT else ["all-linear"]
    values = {
        **base_values(base, adapter, model__family=family, plugins__lora__target_modules=ours),
        "train.global_batch_size": 2,
        **(SAME if patterns else {}),
    }
    plain, cut = (
        [each for (each,) in gloo_pool.run(loaded_gradients, ranks, [(run, ("lora",))], *batch)]
        for ranks, run in ((1, values), (2, {**values, **config}))
    )
    got, want = full_tensors(adapters_alone(cut)), full_tensors(adapters_alone(plain))
    assert got.problems(1e-10) == []
    assert list(differences(got.tensors, want.tensors, 1e-10)) == []
    assert cut[0].losses == pytest.approx(plain[0].losses, rel=1e-10)
    assert len(want.tensors) == 2 * (2 * len(LATENT) + (0 if theirs is LATENT else 3 + 2))
    assert all(tensor.any() for tensor in want.tensors.values())


def test_peft_reads_a_run_and_merges_it_as_convert_does(
    gloo_pool: GlooPool, batch: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    base = write_latent(tmp_path / "base", "deepseek_v2")
    values = {
        **base_values(
            base,
            model__family="deepseek_v2",
            plugins__lora__target_modules=[*ATTENTION],
        ),
        **SP,
        "run.output_dir": str(tmp_path / "run"),
        "data.train": [write_tokens(tmp_path / "tokens", VOCAB, 40, 1)],
        "train.train_iters": 3,
        "train.global_batch_size": 2,
        "optimizer.lr": 0.05,
        "checkpoint.save_interval": 3,
    }
    gloo_pool.run(whole_run, 2, values, ("lora",), timeout=100)
    exported = tmp_path / "run/adapter"
    settings = json.loads((exported / "adapter_config.json").read_text())
    assert settings["target_modules"] == sorted(LATENT)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        model = read_peft(base, exported)
    stored = load_file(exported / "adapter_model.safetensors")
    held = trained(model)
    assert held.keys() == stored.keys()
    assert len(stored) == 2 * len(LATENT) * 2
    assert all(torch.equal(held[name], tensor) for name, tensor in stored.items())

    assert convert("--to", "hf", tmp_path / "run", tmp_path / "merged") == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        adapted = model(input_ids=batch[0]).logits
        assert largest_difference(merged(input_ids=batch[0]).logits, adapted) < TOLERANCE
        with model.disable_adapter():
            assert largest_difference(model(input_ids=batch[0]).logits, adapted) > 0.01

    assert convert("--to", "peft", tmp_path / "run", tmp_path / "written") == 0
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        again = trained(read_peft(base, tmp_path / "written"))
    assert all(torch.equal(again[name], tensor) for name, tensor in stored.items())


@pytest.mark.exhaustive(by=lambda: ())
def test_a_run_in_two_halves_is_the_run_in_one(gloo_pool: GlooPool, tmp_path: Path) -> None:
    small = {"plugins.lora.dropout": 0.2, "train.global_batch_size": 2}
    runs = Runs(gloo_pool, tmp_path, ({**MODEL, **small, **SP}, 2, ("lora",)))
    runs.assert_the_same_in_two_halves()
