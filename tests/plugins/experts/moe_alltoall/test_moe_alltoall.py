"""Runs with overlapped all-to-alls against the run without them."""

from __future__ import annotations

from typing import Any

import pytest

from ascend_run.plugin_api import AscendRunError, Claim
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.plugins.experts.moe_alltoall import MoeAlltoall
from ascend_run.testing.models import MOE
from ascend_run.testing.parity import Parity
from ascend_run.testing.pool import GlooPool
from tests.support.communication import differences
from tests.support.costs import planned
from tests.support.needed_plugins import case
from tests.support.saved_tensors import expected_bytes, saved_bytes
from tests.support.tiny_options import planned_with

NAME = "moe-alltoall"
SHARED = {"model.moe_shared_expert_intermediate_size": 24}
OVERLAPPED = {**SHARED, "model.moe_shared_expert_overlap": True}
DROPS = {"model.moe_expert_capacity_factor": 0.8}
PADS = {**DROPS, "model.moe_pad_expert_input_to_capacity": True}
EXPERTS_ON_TWO = {"parallel.expert_model_parallel_size": 2}


@pytest.mark.exhaustive(by=lambda beside, layout, config: (*beside, *layout, str(config)))
@pytest.mark.parametrize(
    ("beside", "layout", "config"),
    [
        ((), {"dp": 2, "ep": 2}, SHARED),
        ((), {"dp": 2, "ep": 2}, {**OVERLAPPED, "model.moe_shared_expert_gate": True}),
        ((), {"tp": 2, "ep": 2}, OVERLAPPED),
        ((), {"tp": 2, "dp": 2, "ep": 2, "expt_tp": 2}, OVERLAPPED),
        ((), {"dp": 4, "ep": 4}, {"model.num_moe_experts": 32}),
        ((), {"dp": 2, "ep": 2}, {**OVERLAPPED, **DROPS}),
        ((), {"pp": 2, "dp": 2, "ep": 2}, {**OVERLAPPED, **PADS}),
        case(("moe-permute-fusion",), {"pp": 2, "dp": 2, "ep": 2}, OVERLAPPED),
        case(("gmm", "moe-permute-fusion"), {"dp": 2, "ep": 2}, OVERLAPPED),
    ],
    ids=str,
)
def test_it_keeps_loss_gradients_and_weights(
    parity: Parity, beside: tuple[str, ...], layout: dict[str, int], config: dict[str, Any]
) -> None:
    """The campaign ``together`` has every layout and every pair. Tensor parallelism changes which
    tokens are dropped; ``tests/ops/experts/test_routed_layer.py`` has it."""
    parity(NAME, beside=beside, model="moe", layout=layout, config=config)


def test_recomputed_layers_are_dispatched_again(parity: Parity) -> None:
    recomputed = {
        "model.recompute_granularity": "selective",
        "model.recompute_modules": ["moe"],
    }
    parity(NAME, model="moe", layout={"dp": 2, "ep": 2}, config=recomputed)


def test_it_claims_the_dispatcher_and_is_idle_with_all_experts_on_a_rank() -> None:
    assert claims_of(MoeAlltoall) == (Claim.TOKEN_DISPATCHER,)
    assert {*planned_with(NAME).plan.idle} == {NAME}
    with pytest.raises(AscendRunError, match="moe_token_dispatcher_type=alltoall"):
        planned_with(NAME, "model.moe_token_dispatcher_type=allgather")


@pytest.mark.parametrize(
    "config", [SHARED, OVERLAPPED, PADS], ids=["shared", "overlapped", "padded"]
)
def test_communication_matches_the_cost_model(gloo_pool: GlooPool, config: dict[str, Any]) -> None:
    longer = {"data.seq_length": 64, "model.num_moe_experts": 16}  # more than a few numbers
    values = {**MOE, **longer, **config, **EXPERTS_ON_TWO}
    assert differences(gloo_pool, values, (NAME,)) == []


def test_all_to_alls_are_overlapped_if_shared_experts_are() -> None:
    for config, hidden in ((SHARED, False), (OVERLAPPED, True)):
        _, (cost,) = planned({**MOE, **config, **EXPERTS_ON_TWO}, (NAME,), 2)
        found = [c.overlapped for c in cost.communication if c.operation == "all_to_all"]
        assert len(found) == 4
        assert {*found} == {hidden}


@pytest.mark.exhaustive
@pytest.mark.parametrize("others", [(), ("moe-permute-fusion",)], ids=str)
@pytest.mark.parametrize("factor", [None, 1.0], ids=str)
def test_saved_indices_are_in_the_memory_estimate(
    gloo_pool: GlooPool, factor: float | None, others: tuple[str, ...]
) -> None:
    """Together on both ranks, since the routing decides how much each saves."""
    values = {**MOE, **EXPERTS_ON_TWO, "train.global_batch_size": 2}
    if factor is not None:
        values |= {**PADS, "model.moe_expert_capacity_factor": factor}
    runs = [(others, values), ((*others, NAME), values)]
    measured = [plugin - plain for plain, plugin in gloo_pool.run(saved_bytes, 2, runs)]
    plain, plugin = (expected_bytes(planned(config, names, 2)[1][0]) for names, config in runs)
    assert sum(measured) == 2 * (plugin - plain)


def test_indices_of_rows_on_every_rank_of_an_expert_are_in_the_estimate(
    gloo_pool: GlooPool,
) -> None:
    shared = {
        "parallel.tensor_model_parallel_size": 2,
        "parallel.sequence_parallel": True,
        "parallel.expert_tensor_parallel_size": 2,
        "train.global_batch_size": 2,
    }
    runs = [
        ((), {**MOE, **EXPERTS_ON_TWO, **shared}),
        ((NAME,), {**MOE, **EXPERTS_ON_TWO, **shared}),
    ]
    measured = [plugin - plain for plain, plugin in gloo_pool.run(saved_bytes, 4, runs)]
    plain, plugin = (expected_bytes(planned(config, names, 4)[1][0]) for names, config in runs)
    assert sum(measured) == 4 * (plugin - plain)
