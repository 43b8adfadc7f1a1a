"""Runs with the double ring against the unsharded run without it."""

from __future__ import annotations

import pytest

from ascend_run.plugin_api.testing.models import DENSE
from ascend_run.plugin_api.testing.parity import Parity
from ascend_run.plugin_api.testing.pool import GlooPool
from ascend_run.plugin_api.testing.runtime import Trial, run_trial
from tests.support.costs import calls, planned, sent_bytes

PLUGIN = "double-ring"
GROUPS = ("double_ring_window", "double_ring_windows")


@pytest.mark.parametrize(
    ("model", "layout", "window", "hops"),
    [
        ("dense", {"cp": 4}, 1, 3),
        ("moe", {"cp": 4, "ep": 2}, 2, 3),
        ("dense", {"cp": 2, "tp": 2}, 1, 1),
    ],
    ids=str,
)
def test_loss_gradients_and_weights_are_those_of_the_whole_sequence(
    parity: Parity, model: str, layout: dict[str, int], window: int, hops: int
) -> None:
    """The campaign ``together`` has every layout."""
    options = {f"plugins.{PLUGIN}.window": window}
    for outcome in parity(PLUGIN, model=model, layout=layout, options=options):
        assert outcome.collectives["send"] == 2 * 4 * 3 * hops  # layers, micro-batches, rings


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
    for name, ranks in zip(GROUPS, ((0, 1), (0, 2)), strict=True):
        sent = [m for m in outcome.messages if m.operation == "send" and m.ranks == ranks]
        assert calls(cost, "send", name) == len(sent)
        assert sent_bytes(cost, "send", name) == sum(m.nbytes for m in sent)
