"""What the plugin says that it sends is what ranks send."""

from __future__ import annotations

import pytest

from ascend_run.plugin_api.testing.models import DENSE
from ascend_run.plugin_api.testing.pool import GlooPool
from ascend_run.plugin_api.testing.runtime import Trial, run_trial
from tests.support.costs import calls, planned, sent_bytes


@pytest.mark.parametrize("size", [2, 4])
def test_messages_and_bytes_are_those_of_the_exchange(gloo_pool: GlooPool, size: int) -> None:
    config = {**DENSE, "parallel.context_parallel_size": size}
    _, (cost,) = planned(config, ("ulysses",), size)

    trial = Trial(plugins=("ulysses",), config=config, steps=1)
    outcome = gloo_pool.run(run_trial, size, trial)[0]

    assert calls(cost, "all_to_all", "cp") == outcome.collectives["alltoall_base_"]
    assert sent_bytes(cost, "all_to_all", "cp") == outcome.sent_bytes["alltoall_base_"]


def test_one_rank_exchanges_nothing_and_expects_nothing() -> None:
    _, (cost,) = planned(DENSE, ("ulysses",))
    assert cost.messages == ()
    assert "ulysses" not in cost.changes
