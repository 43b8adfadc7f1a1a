"""Runs with exchange and ring against the unsharded run without them."""

from __future__ import annotations

import pytest

from ascend_run.plugin_api.testing.models import DENSE
from ascend_run.plugin_api.testing.parity import Parity
from ascend_run.plugin_api.testing.pool import GlooPool
from ascend_run.plugin_api.testing.runtime import Trial, run_trial
from tests.support.costs import calls, planned, sent_bytes

PLUGIN = "hybrid-cp"


@pytest.mark.parametrize(
    ("model", "layout", "degree"),
    [
        ("dense", {"cp": 4}, 1),
        ("moe", {"cp": 4, "ep": 2}, 2),
        ("dense", {"cp": 2, "tp": 2}, 2),
    ],
    ids=str,
)
def test_loss_gradients_and_weights_are_those_of_the_whole_sequence(
    parity: Parity, model: str, layout: dict[str, int], degree: int
) -> None:
    """The campaign ``together`` has every layout."""
    options = {f"plugins.{PLUGIN}.ulysses_degree": degree}
    for outcome in parity(PLUGIN, model=model, layout=layout, options=options):
        # layers, micro-batches, rings, hops
        assert outcome.collectives.get("send", 0) == 2 * 4 * 3 * (layout["cp"] // degree - 1)


@pytest.mark.parametrize("kv_cache", ["none", "half", "full"])
def test_messages_and_bytes_are_those_that_the_plan_says(
    gloo_pool: GlooPool, kv_cache: str
) -> None:
    config = {
        **DENSE,
        "parallel.context_parallel_size": 4,
        f"plugins.{PLUGIN}.kv_cache": kv_cache,
        f"plugins.{PLUGIN}.kv_cache_every": 1 if kv_cache == "none" else 2,
    }
    _, (cost,) = planned(config, (PLUGIN,), 4)
    trial = Trial(plugins=(PLUGIN,), config=config, steps=1)
    outcome = gloo_pool.run(run_trial, 4, trial)[0]
    for name, operation, count, ranks in (
        ("hybrid_cp_heads", "all_to_all", "alltoall_base_", (0, 1)),
        ("hybrid_cp_window", "send", "send", (0, 2)),
    ):
        sent = [m for m in outcome.messages if (m.operation, m.ranks) == (count, ranks)]
        assert calls(cost, operation, name) == len(sent)
        assert sent_bytes(cost, operation, name) == sum(m.nbytes for m in sent)
