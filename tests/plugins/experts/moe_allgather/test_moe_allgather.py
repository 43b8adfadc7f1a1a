"""Runs with the all-gather dispatcher against the run without it."""

from __future__ import annotations

from typing import Any

import pytest

from ascend_run.plugin_api import AscendRunError, Claim
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.plugins.experts.moe_allgather import MoeAllgather
from ascend_run.testing.models import MOE
from ascend_run.testing.parity import Case, Parity
from ascend_run.testing.pool import GlooPool
from tests.support.communication import differences
from tests.support.costs import planned
from tests.support.needed_plugins import case
from tests.support.saved_tensors import expected_bytes, saved_bytes
from tests.support.tiny_options import planned_with

NAME = "moe-allgather"
GATHER = {"model.moe_token_dispatcher_type": "allgather"}


@pytest.mark.exhaustive(by=lambda beside, layout: (*beside, *layout))
@pytest.mark.parametrize(
    ("beside", "layout", "config"),
    [
        ((), {}, {}),
        ((), {"dp": 2, "ep": 2}, {"model.moe_shared_expert_intermediate_size": 24}),
        ((), {"tp": 2, "ep": 2}, {}),
        ((), {"dp": 2, "ep": 2}, {"model.moe_expert_capacity_factor": 0.8}),
        ((), {"tp": 2, "dp": 2, "ep": 2, "expt_tp": 2}, {}),
        case(("gmm",), {"dp": 4, "ep": 4}, {"model.num_moe_experts": 32}),
    ],
    ids=str,
)
def test_it_keeps_loss_gradients_and_weights(
    parity: Parity, beside: tuple[str, ...], layout: dict[str, int], config: dict[str, Any]
) -> None:
    """The campaign ``together`` has every pair, without expert tensor parallelism."""
    parity(NAME, beside=beside, model="moe", layout=layout, config={**GATHER, **config})


def test_fewer_bytes_are_gathered_and_nothing_is_added_by_index(parity: Parity) -> None:
    layout, experts = {"dp": 2, "ep": 2}, {"model.num_moe_experts": 32}
    outcomes = parity(NAME, model="moe", layout=layout, config={**GATHER, **experts})
    plain = parity.outcomes(
        Case(plugins=(), model="moe", layout=layout, config={**GATHER, **experts})
    )
    for outcome, without in zip(outcomes, plain, strict=True):
        names = ("_allgather_base_", "_reduce_scatter_base_")
        assert all(outcome.sent_bytes[name] < without.sent_bytes[name] for name in names)
        assert outcome.collectives == without.collectives
        assert outcome.operations.get("scatter_add_", 0) < without.operations["scatter_add_"]


def test_it_claims_the_dispatcher_and_is_idle_without_experts() -> None:
    assert claims_of(MoeAllgather) == (Claim.TOKEN_DISPATCHER,)
    gather = "model.moe_token_dispatcher_type=allgather"
    assert {*planned_with(NAME, gather).plan.idle} == {NAME}
    with pytest.raises(AscendRunError, match=gather):
        planned_with(NAME)
    assert {*MoeAllgather.manifest.conflicts} == {"moe-permute-fusion"}
    padded = (gather, "model.moe_expert_capacity_factor=1.0")
    with pytest.raises(AscendRunError, match="moe_pad_expert_input_to_capacity=false"):
        planned_with(NAME, *padded, "model.moe_pad_expert_input_to_capacity=true")


@pytest.mark.parametrize("ranks", [2, 4])
def test_communication_matches_the_cost_model(gloo_pool: GlooPool, ranks: int) -> None:
    longer = {"data.seq_length": 64, "model.num_moe_experts": 16}  # more than a few numbers
    layout = {"parallel.expert_model_parallel_size": ranks}
    assert differences(gloo_pool, {**MOE, **GATHER, **longer, **layout}, (NAME,)) == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_saved_indices_are_in_the_memory_estimate(gloo_pool: GlooPool, ranks: int) -> None:
    """Together on all ranks, since the routing decides how much each saves."""
    layout = {"parallel.expert_model_parallel_size": ranks}
    values = {**MOE, **GATHER, **layout, "model.num_moe_experts": 8, "train.global_batch_size": 2}
    runs = [((), values), ((NAME,), values)]
    measured = [plugin - plain for plain, plugin in gloo_pool.run(saved_bytes, ranks, runs)]
    plain, plugin = (expected_bytes(planned(config, names, ranks)[1][0]) for names, config in runs)
    assert sum(measured) == ranks * (plugin - plain)
