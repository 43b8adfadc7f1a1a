"""Runs whose heads or sequence the ranks do not divide against the unsharded run without."""

from __future__ import annotations

from typing import Any

import pytest

from ascend_run.plugin_api.testing.models import DENSE
from ascend_run.plugin_api.testing.parity import Parity
from ascend_run.plugin_api.testing.pool import GlooPool
from ascend_run.plugin_api.testing.runtime import Trial, run_trial
from tests.support.costs import calls, planned, sent_bytes

PLUGIN = "unaligned-ulysses"
ODD = {
    "model.hidden_size": 30,
    "model.num_attention_heads": 10,
    "model.num_query_groups": 2,
    "model.kv_channels": 4,
    "data.seq_length": 18,
}
LAYERS, MESSAGES = 2, 4


@pytest.mark.parametrize(
    ("model", "layout", "config"),
    [
        ("moe", {"cp": 4, "ep": 2}, {**ODD, "data.seq_length": 17}),
        ("dense", {"cp": 3, "dp": 1}, {"data.seq_length": 17}),
        ("dense", {"cp": 2, "tp": 2}, {**ODD, "data.seq_length": 18}),
        ("dense", {"cp": 2, "pp": 2}, {**ODD, "data.seq_length": 17}),
    ],
    ids=["experts", "three-ranks", "tensor-parallel", "pipeline"],
)
def test_loss_gradients_and_weights_are_those_of_the_whole_sequence(
    parity: Parity, model: str, layout: dict[str, int], config: dict[str, Any]
) -> None:
    """The campaign ``together`` has every layout."""
    for outcome in parity(PLUGIN, model=model, layout=layout, config=config):
        assert outcome.collectives["alltoall_base_"] >= LAYERS * MESSAGES


@pytest.mark.parametrize("kv_cache", ["half", "full"])
def test_the_plan_says_what_the_rank_that_sends_most_sends(
    gloo_pool: GlooPool, kv_cache: str
) -> None:
    size = 4
    config = {
        **DENSE,
        **ODD,
        "parallel.context_parallel_size": size,
        f"plugins.{PLUGIN}.kv_cache": kv_cache,
        f"plugins.{PLUGIN}.kv_cache_every": 2,
    }
    _, (cost,) = planned(config, (PLUGIN,), size)
    trial = Trial(plugins=(PLUGIN,), config=config, steps=1)
    outcomes = gloo_pool.run(run_trial, size, trial)
    assert {calls(cost, "all_to_all", "cp")} == {o.collectives["alltoall_base_"] for o in outcomes}
    most = max(o.sent_bytes["alltoall_base_"] for o in outcomes)
    assert sent_bytes(cost, "all_to_all", "cp") == most
