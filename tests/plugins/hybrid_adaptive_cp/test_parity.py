"""Runs with heads and keys exchanged against the unsharded run without them."""

from __future__ import annotations

from typing import Any

import pytest

from ascend_run.plugin_api.testing.models import DENSE
from ascend_run.plugin_api.testing.parity import Parity
from ascend_run.plugin_api.testing.pool import GlooPool
from ascend_run.plugin_api.testing.runtime import Trial, run_trial
from tests.support.costs import calls, planned, sent_bytes

PLUGIN = "hybrid-adaptive-cp"
WINDOW = {"model.window_size": [5, 0]}


@pytest.mark.parametrize(
    ("layout", "model", "config"),
    [
        ({"cp": 4}, "dense", WINDOW),
        ({"cp": 2, "tp": 2}, "dense", {}),
        ({"cp": 2, "pp": 2, "ep": 2}, "moe", {}),
    ],
    ids=str,
)
def test_loss_gradients_and_weights_are_those_of_the_whole_sequence(
    parity: Parity, layout: dict[str, int], model: str, config: dict[str, Any]
) -> None:
    for outcome in parity(PLUGIN, model=model, layout=layout, config=config):
        assert outcome.collectives["alltoall_base_"] > 0


def test_messages_and_bytes_are_those_that_the_plan_says(gloo_pool: GlooPool) -> None:
    """Of the rank that sends most, which is what a plan shows."""
    config = {**DENSE, **WINDOW, "parallel.context_parallel_size": 4}
    _, (cost,) = planned(config, (PLUGIN,), 4)
    outcomes = gloo_pool.run(run_trial, 4, Trial(plugins=(PLUGIN,), config=config, steps=1))
    most = max(outcomes, key=lambda outcome: outcome.sent_bytes["send"])
    for name, operation, count in (
        ("hybrid_adaptive_cp_heads", "all_to_all", "alltoall_base_"),
        ("hybrid_adaptive_cp_keys", "send", "send"),
    ):
        found = [m.nbytes for m in most.messages if m.operation == count]
        assert calls(cost, operation, name) == len(found)
        assert sent_bytes(cost, operation, name) == sum(found)
