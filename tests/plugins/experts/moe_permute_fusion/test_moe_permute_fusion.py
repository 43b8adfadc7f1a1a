"""Runs with the fused permutation against the run without it."""

from __future__ import annotations

from typing import Any

import pytest

from ascend_run.plugin_api import AscendRunError, Numerics
from ascend_run.plugins.experts.moe_permute_fusion import MoePermuteFusion
from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.parity import Case, Parity
from ascend_run.testing.pool import GlooPool
from tests.support.communication import differences
from tests.support.costs import planned
from tests.support.needed_plugins import case
from tests.support.tiny_options import planned_with

LAYERS, MICRO_BATCHES = 2, 4
NAME = "moe-permute-fusion"
PADS = {
    "model.moe_expert_capacity_factor": 0.8,
    "model.moe_pad_expert_input_to_capacity": True,
}


@pytest.mark.exhaustive(by=lambda beside, layout: (*beside, *layout))
@pytest.mark.parametrize(
    ("beside", "layout", "config"),
    [
        ((), {}, {}),
        ((), {"dp": 2, "ep": 2}, {"model.num_moe_experts": 32}),
        ((), {"tp": 2, "expt_tp": 2}, {}),
        ((), {}, {"model.moe_expert_capacity_factor": 0.8}),
        case(("gmm", "moe-adaptive-recompute"), {"dp": 2, "ep": 2}, PADS),
        ((), {"tp": 2, "dp": 2, "ep": 2}, {"model.moe_shared_expert_intermediate_size": 24}),
        case(("gmm",), {"dp": 2, "ep": 2}, {"model.moe_router_topk": 3}),
    ],
    ids=str,
)
def test_it_keeps_loss_gradients_and_weights(
    parity: Parity, beside: tuple[str, ...], layout: dict[str, int], config: dict[str, Any]
) -> None:
    """The campaign ``together`` has every pair, without expert tensor parallelism."""
    parity(NAME, beside=beside, model="moe", layout=layout, config=config)


def test_sums_gather_and_nothing_is_added_by_index(parity: Parity) -> None:
    (outcome,) = parity(NAME, model="moe")
    (plain,) = parity.outcomes(Case(plugins=(), model="moe"))
    sums = LAYERS * MICRO_BATCHES * 2
    assert outcome.operations["_embedding_bag_forward_only"] == sums
    less = {"scatter_add_": sums // 2, "masked_select": sums, "index_add": sums // 2}
    assert {name: plain.operations[name] - outcome.operations.get(name, 0) for name in less} == less


def test_it_needs_the_all_to_all_dispatcher_and_is_idle_without_experts() -> None:
    assert MoePermuteFusion.manifest.numerics is Numerics.ROUNDING
    assert {*planned_with(NAME).plan.idle} == {NAME}
    with pytest.raises(AscendRunError, match="moe_token_dispatcher_type=alltoall"):
        planned_with(NAME, "model.moe_token_dispatcher_type=allgather")


def test_communication_is_that_of_the_plain_dispatcher(gloo_pool: GlooPool) -> None:
    longer = {"data.seq_length": 64, "model.num_moe_experts": 16}  # more than a few numbers
    layout = {"parallel.expert_model_parallel_size": 2}
    assert differences(gloo_pool, {**MOE, **longer, **layout}, (NAME,)) == []


def test_a_dense_model_is_left_alone() -> None:
    _, (cost,) = planned(DENSE, (NAME,))
    assert NAME not in cost.changes
