"""Logits and every adapter's gradient against PEFT's, on adapters saved by PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_run.testing.pool import GlooPool
from tests.support.loaded_model import largest_difference
from tests.support.tiny_llama import write_llama

from .against_peft import TOLERANCE, assert_is_of_peft, of_peft
from .lora_jobs import base_values, hf_names, run_once
from .peft_models import EVERY, VOCAB, peft_model, write_peft

TARGETS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "all": (EVERY, ("all-linear",)),
    "attention": (("q_proj", "k_proj", "v_proj", "o_proj"), ("linear_qkv", "linear_proj")),
    "queries and values": (("q_proj", "v_proj"), ("linear_q", "linear_v")),
    "keys and up": (("k_proj", "up_proj"), ("linear_k", "linear_fc1_up")),
    "feed-forward": (("gate_proj", "up_proj", "down_proj"), ("linear_fc1", "linear_fc2")),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_llama(tmp_path_factory.mktemp("base"), VOCAB)


@pytest.mark.exhaustive(by=lambda targets: [targets == "all"])
@pytest.mark.parametrize("targets", TARGETS)
def test_logits_and_every_adapters_gradient_are_pefts(
    gloo_pool: GlooPool, base: str, batch: tuple[Tensor, Tensor], tmp_path: Path, targets: str
) -> None:
    theirs, ours = TARGETS[targets]
    model = peft_model(base, targets=theirs)
    adapter = write_peft(model, tmp_path)
    values = base_values(base, adapter, plugins__lora__target_modules=list(ours))
    (outcome,) = gloo_pool.run(run_once, 1, values, *batch)
    assert_is_of_peft(outcome, of_peft(model, batch))


@pytest.mark.parametrize("rslora", [False, True])
def test_the_scale_is_pefts(
    gloo_pool: GlooPool, base: str, batch: tuple[Tensor, Tensor], tmp_path: Path, rslora: bool
) -> None:
    model = peft_model(base, use_rslora=rslora, lora_alpha=3)
    adapter = write_peft(model, tmp_path)
    values: dict[str, Any] = base_values(
        base, adapter, plugins__lora__alpha=3.0, plugins__lora__rslora=rslora
    )
    (outcome,) = gloo_pool.run(run_once, 1, values, *batch)
    with torch.no_grad():
        logits = model(input_ids=batch[0]).logits
    assert largest_difference(outcome.logits_BSV, logits) < TOLERANCE


def test_ranks_and_alphas_by_module_are_pefts(
    gloo_pool: GlooPool, base: str, batch: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    ranks, alphas = {"q_proj": 2, "v_proj": 3, "down_proj": 6}, {"k_proj": 5, "gate_proj": 3}
    model = peft_model(base, use_rslora=True, rank_pattern=ranks, alpha_pattern=alphas)
    adapter = write_peft(model, tmp_path)
    values = base_values(
        base,
        adapter,
        plugins__lora__rslora=True,
        plugins__lora__rank_pattern={"linear_q": 2, "linear_v": 3, "linear_fc2": 6},
        plugins__lora__alpha_pattern={"linear_k": 5.0, "linear_fc1_gate": 3.0},
    )
    (outcome,) = gloo_pool.run(run_once, 1, values, *batch)
    assert_is_of_peft(outcome, of_peft(model, batch))


def test_a_new_adapter_leaves_the_model_as_it_is(
    gloo_pool: GlooPool, base: str, batch: tuple[Tensor, Tensor]
) -> None:
    (adapted,) = gloo_pool.run(run_once, 1, base_values(base), *batch)
    plain = {k: v for k, v in base_values(base).items() if not k.startswith("plugins.")}
    (bare,) = gloo_pool.run(run_once, 1, plain, *batch, ())
    assert torch.equal(adapted.logits_BSV, bare.logits_BSV)
    gradients = hf_names(adapted.gradients)
    assert all(not g.any() for name, g in gradients.items() if "lora_A" in name)
    assert all(g.any() for name, g in gradients.items() if "lora_B" in name)
