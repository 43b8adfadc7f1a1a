"""Runs with o2-bf16-optimizer: sharded, planned, resumed and loaded in other layouts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from ascend_run.core.hooks import Hooks
from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.tensors import full_tensors
from ascend_run.tools.plan.cost_model.estimate import expected_costs
from tests.core.train.runs import Runs
from tests.support.optimizer_runs import loaded, saved, stepwise
from tests.support.small_runs import prepare

NAME: Final = ("o2-bf16-optimizer",)
FLAT: Final[Mapping[str, Any]] = {
    **DENSE,
    "model.num_layers": 3,  # two ranges of an even number would end between parameters
    "optimizer.clip_grad": 0.0,  # the norm is summed in another order
    "optimizer.adam_beta2": 0.999,
    "train.precision": "bf16",
}
DISTRIBUTED: Final = {"ddp.use_distributed_optimizer": True}
TP: Final = {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}
PP: Final = {"parallel.pipeline_model_parallel_size": 2}
EP: Final = {"parallel.expert_model_parallel_size": 2}


def test_a_distributed_optimizer_updates_like_a_replicated_one(gloo_pool: GlooPool) -> None:
    """Bitwise, with every rounding: weights, master weights and states after each step."""
    found = []
    for ddp in ({}, DISTRIBUTED):
        ranks = gloo_pool.run(stepwise, 2, {**FLAT, **ddp}, NAME, 5, timeout=100)
        assert any(rank.has_parts for rank in ranks) == bool(ddp)
        found.append([full_tensors([rank.outcomes[at] for rank in ranks]) for at in range(6)])
    for got, want in zip(*found, strict=True):
        assert got.problems() == want.problems() == []
        assert got.tensors.keys() == want.tensors.keys()
        apart = [k for k, tensor in want.tensors.items() if not torch.equal(got.tensors[k], tensor)]
        assert apart == []


@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        pytest.param(FLAT, 1, id="one rank"),
        pytest.param({**FLAT, **DISTRIBUTED}, 2, id="distributed"),
    ],
)
def test_the_states_take_half_of_the_bytes(
    gloo_pool: GlooPool, values: Mapping[str, Any], ranks: int
) -> None:
    """4 bytes per parameter less than AdamW's, divided by the data-parallel size; as planned."""
    held, planned = {}, {}
    for names in ((), NAME):
        found = gloo_pool.run(stepwise, ranks, values, names, 1, timeout=100)
        prepared = prepare(values, names, ranks)
        (cost,) = expected_costs(prepared.config, prepared.layout, Hooks(prepared.instances()))
        held[names] = sum(one.state_bytes for one in found)
        planned[names] = ranks * cost.memory.optimizer
        # A distributed optimizer has a scalar of each range, and the plan one of each parameter.
        slack = 0 if ranks == 1 else 8 * len(cost.rank.parameters)
        assert abs(held[names] - planned[names]) <= slack
    assert held[()] - held[NAME] == planned[()] - planned[NAME] == 4 * cost.trained_parameters


@pytest.mark.exhaustive(by=lambda resumed: [resumed[1]] if resumed[1] == 1 else [])
@pytest.mark.parametrize(
    ("begun", "resumed"),
    [
        pytest.param(({**TP, **DISTRIBUTED}, 4), ({**PP, **DISTRIBUTED}, 4), id="tp2 to pp2"),
        pytest.param((DISTRIBUTED, 2), ({}, 1), id="dp2 to one rank"),
    ],
)
def test_states_are_loaded_in_another_layout(
    gloo_pool: GlooPool, tmp_path: Path, begun: Any, resumed: Any
) -> None:
    """Bitwise: weights, master weights and every state."""
    values = {**FLAT, "model.num_layers": 4}
    want, got = (
        full_tensors(gloo_pool.run(job, size, {**values, **layout}, NAME, str(tmp_path)))
        for job, (layout, size) in ((saved, begun), (loaded, resumed))
    )
    assert got.problems() == want.problems() == []
    assert got.tensors.keys() == want.tensors.keys()
    assert [key for key, t in want.tensors.items() if not torch.equal(got.tensors[key], t)] == []
    moments = [t for key, t in want.tensors.items() if key.startswith("optimizer/exp_avg_sq/")]
    assert {t.dtype for t in moments} == {torch.bfloat16}


@pytest.mark.exhaustive(by=lambda values: values)
@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        pytest.param(FLAT, 1, id="one rank"),
        pytest.param({**FLAT, **MOE, **EP, **DISTRIBUTED}, 2, id="moe ep2 distributed"),
    ],
)
def test_a_stopped_run_resumes_bitwise(
    gloo_pool: GlooPool, tmp_path: Path, values: Mapping[str, Any], ranks: int
) -> None:
    """With every rounding of the run in one piece."""
    Runs(gloo_pool, tmp_path, (values, ranks, NAME)).assert_the_same_in_two_halves()


def test_tied_embeddings_of_two_stages_stay_equal(gloo_pool: GlooPool) -> None:
    """Both copies are rounded alike, although each stage has its own optimizer."""
    values = {
        **FLAT,
        **PP,
        "model.num_layers": 4,
        "model.share_embeddings_and_output_weights": True,
    }
    ranks = gloo_pool.run(stepwise, 2, values, NAME, 4, timeout=100)
    found = full_tensors([rank.outcomes[-1] for rank in ranks])
    assert found.problems() == []  # replicas that differ are one
    copies = [
        shard.tensor
        for rank in ranks
        for shard in rank.outcomes[-1].shards
        if shard.name == "optimizer/exp_avg_sq/embedding.word_embeddings.weight"
    ]
    assert len(copies) == 2
    assert torch.equal(*copies)
