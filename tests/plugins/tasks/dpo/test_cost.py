"""What the reference costs: the policy's forwards, and its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ascend_run.testing.models import DENSE, MOE
from ascend_run.tools.plan.cost_model.estimate import RankCost
from tests.support.costs import planned
from tests.support.preference_files import write_pairs

TP = {"parallel.tensor_model_parallel_size": 2}
SP = {**TP, "parallel.sequence_parallel": True}
PP = {"parallel.pipeline_model_parallel_size": 2}
VPP = {**PP, "parallel.virtual_pipeline_model_parallel_size": 2, "model.num_layers": 4}
EP = {"parallel.expert_model_parallel_size": 2}
EXPERTS = {**MOE, "model.moe_aux_loss_coeff": 0.0}
TOKEN_BYTES = 8 + 8 + 4 + 8 + 8
LOG_PROBABILITY_BYTES = 4
"""Of a token on the last stage."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    folder = write_pairs(tmp_path_factory.mktemp("pairs"), 4)
    return {
        "task": "dpo",
        "data.train": [str(folder / "train.jsonl")],
        "data.tokenizer": str(folder / "tokenizer"),
    }


CASES: dict[str, tuple[int, Mapping[str, Any]]] = {
    "dense": (1, DENSE),
    "tied": (1, {**DENSE, "model.share_embeddings_and_output_weights": True}),
    "window": (1, {**DENSE, "model.window_size": [5, 0]}),
    "window of some layers": (
        1,
        {**DENSE, "model.window_size": [5, 0], "model.window_attn_skip_freq": 2},
    ),
    "tp=2": (2, {**DENSE, **TP}),
    "tp=2, sp": (2, {**DENSE, **SP}),
    "pp=2": (2, {**DENSE, **PP}),
    "pp=2, tied": (2, {**DENSE, **PP, "model.share_embeddings_and_output_weights": True}),
    "pp=2, vpp=2": (2, {**DENSE, **VPP}),
    "ep=2": (2, {**EXPERTS, **EP}),
    "tp=2, ep=2": (4, {**EXPERTS, **SP, **EP}),
    "tp=2, expert tp=1": (2, {**EXPERTS, **SP, "parallel.expert_tensor_parallel_size": 1}),
    "tp=2, pp=2, dp=2": (8, {**DENSE, **SP, **PP}),
}


@pytest.mark.parametrize("case", CASES)
def test_it_runs_the_forwards_of_the_policy(pairs: Mapping[str, Any], case: str) -> None:
    ranks, model = CASES[case]
    model = {**model, "model.vocab_size": 397}
    prepared, plain = planned(model, (), ranks)
    _, beside = planned({**model, **pairs}, (), ranks)
    _, free = planned({**model, **pairs, "plugins.dpo.reference_free": True}, (), ranks)
    for one, both, alone in zip(plain, beside, free, strict=True):
        forwards = one.model_flops / 3  # a backward has twice as many
        assert both.flops - one.flops == pytest.approx(forwards, rel=1e-12)
        assert alone.flops == one.flops
        assert buffers(both, one) == one.memory.weights + waiting(one)
        assert buffers(alone, one) == 0
    assert len(plain) == prepared.layout.pp


def waiting(one: RankCost) -> float:
    """Bytes of the micro-batches of a step and of what the reference adds to them."""
    of_token = TOKEN_BYTES + (LOG_PROBABILITY_BYTES if one.rank.is_last else 0)
    return one.rank.num_microbatches * one.rank.tokens * of_token


def buffers(one: RankCost, other: RankCost) -> float:
    return one.memory.buffers - other.memory.buffers


@pytest.mark.parametrize("case", ["dense", "pp=2", "tp=2, ep=2"])
def test_with_precomputed_values_a_step_is_that_without_a_reference(
    pairs: Mapping[str, Any], case: str
) -> None:
    ranks, model = CASES[case]
    model = {**model, "model.vocab_size": 397, **pairs}
    _, free = planned({**model, "plugins.dpo.reference_free": True}, (), ranks)
    _, ahead = planned({**model, "plugins.dpo.precompute_ref_log_probs": True}, (), ranks)
    for one, other in zip(ahead, free, strict=True):
        assert one.flops == other.flops
        assert one.memory == other.memory


@pytest.mark.needs_plugins("lora")
def test_a_base_has_no_weights_of_its_own(pairs: Mapping[str, Any]) -> None:
    model = {**DENSE, "model.vocab_size": 397}
    _, (plain,) = planned(model)
    _, (lora,) = planned(model, ("lora",))
    _, (base,) = planned({**model, **pairs, "plugins.dpo.reference": "base"}, ("lora",))
    assert base.flops - lora.flops == pytest.approx(plain.model_flops / 3, rel=1e-12)
    assert buffers(base, lora) == waiting(base)
