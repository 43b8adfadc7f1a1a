"""Logits and every adapter's gradient against PEFT's, on adapters saved by PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ascend_run.testing.pool import GlooPool
from tests.support.loaded_model import largest_difference
from tests.support.tiny_llama import write_llama

from .lora_jobs import base_values, hf_names, run_once
from .peft_models import EVERY, peft_model, trained, write_peft

TOLERANCE = 1e-5
VOCAB = 61
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


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCAB, (2, 17), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@pytest.mark.exhaustive(by=lambda targets: [targets == "all"])
@pytest.mark.parametrize("targets", TARGETS)
def test_logits_and_every_adapters_gradient_are_pefts(
    gloo_pool: GlooPool, base: str, batch: tuple[Tensor, Tensor], tmp_path: Path, targets: str
) -> None:
    theirs, ours = TARGETS[targets]
    model = peft_model(base, targets=theirs)
    adapter = write_peft(model, tmp_path)
    tokens, labels = batch
    logits = model(input_ids=tokens).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()
    values = base_values(base, adapter, plugins__lora__target_modules=list(ours))
    (outcome,) = gloo_pool.run(run_once, 1, values, tokens, labels)

    assert largest_difference(outcome.logits_BSV, logits.detach()) < TOLERANCE
    assert largest_difference(outcome.loss, loss.detach()) < TOLERANCE
    expected = {name: p.grad for name, p in trained(model).items()}
    gradients = hf_names(outcome.gradients)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert largest_difference(gradient, expected[name]) < TOLERANCE, name
    assert sorted(outcome.trained) == sorted(outcome.gradients), "nothing else is trained"
    with torch.no_grad(), model.disable_adapter():
        plain = model(input_ids=tokens).logits
    assert largest_difference(plain, logits.detach()) > 0.01, "the adapters count"
    assert outcome.merged_logits_BSV is not None
    assert largest_difference(outcome.merged_logits_BSV, logits.detach()) < TOLERANCE


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
    tokens, labels = batch
    logits = model(input_ids=tokens).logits
    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    values = base_values(
        base,
        adapter,
        plugins__lora__rslora=True,
        plugins__lora__rank_pattern={"linear_q": 2, "linear_v": 3, "linear_fc2": 6},
        plugins__lora__alpha_pattern={"linear_k": 5.0, "linear_fc1_gate": 3.0},
    )
    (outcome,) = gloo_pool.run(run_once, 1, values, tokens, labels)
    assert largest_difference(outcome.logits_BSV, logits.detach()) < TOLERANCE
    assert outcome.merged_logits_BSV is not None
    assert largest_difference(outcome.merged_logits_BSV, logits.detach()) < TOLERANCE
    gradients = hf_names(outcome.gradients)
    expected = {name: p.grad for name, p in trained(model).items()}
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert largest_difference(gradient, expected[name]) < TOLERANCE, name


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
