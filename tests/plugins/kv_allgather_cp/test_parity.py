"""Runs with gathered keys against the unsharded run without them."""

from __future__ import annotations

import pytest

from ascend_run.plugin_api.testing.models import DENSE
from ascend_run.plugin_api.testing.parity import Parity
from ascend_run.plugin_api.testing.pool import GlooPool
from ascend_run.plugin_api.testing.runtime import Trial, run_trial
from tests.support.costs import calls, planned, sent_bytes

PLUGIN = "kv-allgather-cp"
OPERATIONS = {"all_gather": "_allgather_base_", "reduce_scatter": "_reduce_scatter_base_"}


def test_loss_gradients_and_weights_are_those_of_the_whole_sequence(parity: Parity) -> None:
    parity(PLUGIN, model="moe", layout={"cp": 4}, options={f"plugins.{PLUGIN}.groups_at_once": 1})


@pytest.mark.parametrize("layout", [{"cp": 2, "tp": 2}, {"cp": 2, "pp": 2, "ep": 2}], ids=str)
def test_it_goes_with_tensor_expert_and_pipeline_parallelism(
    parity: Parity, layout: dict[str, int]
) -> None:
    parity(PLUGIN, model="moe" if "ep" in layout else "dense", layout=layout)


@pytest.mark.parametrize("kv_cache", ["none", "half", "full"])
def test_messages_and_bytes_are_those_that_the_plan_says(
    gloo_pool: GlooPool, kv_cache: str
) -> None:
    config = {
        **DENSE,
        "parallel.context_parallel_size": 2,
        f"plugins.{PLUGIN}.kv_cache": kv_cache,
        f"plugins.{PLUGIN}.kv_cache_every": 1 if kv_cache == "none" else 2,
        f"plugins.{PLUGIN}.groups_at_once": 1,
    }
    _, (cost,) = planned(config, (PLUGIN,), 2)
    trial = Trial(plugins=(PLUGIN,), config=config, steps=1)
    outcome = gloo_pool.run(run_trial, 2, trial)[0]
    for operation, name in OPERATIONS.items():
        sent = [m for m in outcome.messages if m.operation == name and m.ranks == (0, 1)]
        assert calls(cost, operation, "cp") == len(sent)
        assert sent_bytes(cost, operation, "cp") == sum(m.nbytes for m in sent)
