"""What the plugin says that it sends is what ranks send."""

from __future__ import annotations

import pytest

from ascend_run.plugin_api.testing.models import DENSE
from ascend_run.plugin_api.testing.pool import GlooPool
from ascend_run.plugin_api.testing.runtime import Trial, run_trial
from tests.support.costs import calls, planned, sent_bytes


@pytest.mark.parametrize("kv_cache", ["none", "half", "full"])
def test_messages_and_bytes_are_those_of_the_ring(gloo_pool: GlooPool, kv_cache: str) -> None:
    config = {
        **DENSE,
        "parallel.context_parallel_size": 2,
        "plugins.ring-attention.kv_cache": kv_cache,
        "plugins.ring-attention.kv_cache_every": 1 if kv_cache == "none" else 2,
    }
    _, (cost,) = planned(config, ("ring-attention",), 2)

    trial = Trial(plugins=("ring-attention",), config=config, steps=1)
    outcome = gloo_pool.run(run_trial, 2, trial)[0]

    assert calls(cost, "send", "cp") == outcome.collectives["send"]
    assert sent_bytes(cost, "send", "cp") == outcome.sent_bytes["send"]
