"""Bytes and calls of a step, against those that the kit counts on ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ascend_run.core.cost.estimate import RankCost
from ascend_run.core.cost.state import keeps_own_gradients
from ascend_run.entrypoints.planning import Prepared
from ascend_run.plugin_api.testing.models import MODELS
from ascend_run.plugin_api.testing.pool import GlooPool
from ascend_run.plugin_api.testing.runtime import RankOutcome, Trial, run_trial
from tests.support.costs import planned, sent_bytes

_COUNTED = {
    "all_reduce": ("allreduce_", "allreduce_coalesced_"),
    "all_gather": ("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_"),
    "reduce_scatter": (
        "_reduce_scatter_base_",
        "reduce_scatter_",
        "reduce_scatter_tensor_coalesced_",
    ),
    "all_to_all": ("alltoall_base_",),
    "send": ("send",),
}
_SCALARS = 1024
"""Norms, numbers of tokens and losses: a few numbers a step, which the plan leaves out."""
_TP = {"parallel.tensor_model_parallel_size": 2}
_SP = {**_TP, "parallel.sequence_parallel": True}
_EP = {"parallel.expert_model_parallel_size": 2}
_CUT = {"parallel.expert_tensor_parallel_size": 2}
_GATHER = {"model.moe_token_dispatcher_type": "allgather"}
_PP = {"parallel.pipeline_model_parallel_size": 2}
_VPP = {**_PP, "parallel.virtual_pipeline_model_parallel_size": 2, "model.num_layers": 4}


def to_itself(prepared: Prepared, cost: RankCost) -> float:
    """Bytes of gradients that a rank reduces with nobody: a call, and no message."""
    layout, config = prepared.layout, prepared.config
    if keeps_own_gradients(config, layout, cost.rank.num_micro_batches):
        return 0.0
    alone = {False: layout.dp * layout.cp == 1, True: layout.expt_dp == 1}
    return 4.0 * sum(p.numel for p in cost.rank.parameters if alone[p.is_expert])


def counted(outcome: RankOutcome, operation: str) -> int:
    return sum(outcome.sent_bytes.get(name, 0) for name in _COUNTED[operation])


@pytest.mark.parametrize(
    ("model", "values"),
    [
        pytest.param("dense", _TP, id="tp"),
        pytest.param("dense", _SP, id="tp-sequence"),
        pytest.param("moe", _EP, id="ep"),
        pytest.param("moe", {**_EP, **_GATHER}, id="ep-gathered"),
        pytest.param("moe", {**_SP, **_CUT, **_GATHER}, id="expert-tp-gathered"),
        pytest.param("dense", {}, id="dp"),
        pytest.param("dense", {"ddp.use_distributed_optimizer": True}, id="dp-spread"),
        pytest.param("dense", _PP, id="pp"),
        pytest.param("dense", _VPP, id="vpp"),
    ],
)
def test_a_step_sends_what_was_expected(
    gloo_pool: GlooPool, model: str, values: Mapping[str, Any]
) -> None:
    config = {**MODELS[model], **values}
    prepared, costs = planned(config, world_size=2)

    outcomes = gloo_pool.run(run_trial, 2, Trial(config=config, steps=1))

    for stage, cost in enumerate(costs):
        # Of all ranks of the stage: which experts get more tokens is the routing's affair.
        own = [o for n, o in enumerate(outcomes) if prepared.layout.coordinate("pp", n) == stage]
        for operation in _COUNTED:
            expected = sent_bytes(cost, operation)
            if operation == "all_reduce":
                expected += to_itself(prepared, cost)
            seen = sum(counted(outcome, operation) for outcome in own) / len(own)
            assert abs(seen - expected) <= max(_SCALARS, 0.002 * expected), (stage, operation)
