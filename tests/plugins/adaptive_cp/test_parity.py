"""Runs whose sequence is shared by the mask against the unsharded run without it."""

from __future__ import annotations

from typing import Any

import pytest

from ascend_run.plugin_api.testing.models import DENSE
from ascend_run.plugin_api.testing.parity import Parity
from ascend_run.plugin_api.testing.pool import GlooPool
from ascend_run.plugin_api.testing.runtime import Trial, run_trial
from tests.support.costs import calls, planned, sent_bytes

PLUGIN = "adaptive-cp"
WINDOW = {"model.window_size": [5, 0]}


@pytest.mark.parametrize(
    ("layout", "model", "config"),
    [
        ({"cp": 4}, "dense", {}),
        ({"cp": 2, "tp": 2}, "dense", WINDOW),
        ({"cp": 2, "pp": 2, "ep": 2}, "moe", {}),
    ],
    ids=str,
)
def test_loss_gradients_and_weights_are_those_of_the_whole_sequence(
    parity: Parity, layout: dict[str, int], model: str, config: dict[str, Any]
) -> None:
    for outcome in parity(PLUGIN, model=model, layout=layout, config=config):
        assert outcome.collectives["send"] > 0


@pytest.mark.needs_plugins("eod-reset")
def test_a_batch_of_documents_is_shared_by_them(parity: Parity) -> None:
    """The vocabulary is small, so that documents end in every sample."""
    parity(
        (PLUGIN, "eod-reset"),
        layout={"cp": 4},
        config={"model.vocab_size": 6},
        options={"plugins.eod-reset.eod_token_id": 1},
    )


def test_messages_and_bytes_are_those_that_the_plan_says(gloo_pool: GlooPool) -> None:
    """Of the rank that sends most, which is what a plan shows."""
    config = {**DENSE, **WINDOW, "parallel.context_parallel_size": 4}
    _, (cost,) = planned(config, (PLUGIN,), 4)
    outcomes = gloo_pool.run(run_trial, 4, Trial(plugins=(PLUGIN,), config=config, steps=1))
    most = max(outcomes, key=lambda outcome: outcome.sent_bytes["send"])
    assert sent_bytes(cost, "send", "cp") == most.sent_bytes["send"]
    assert calls(cost, "send", "cp") == most.collectives["send"]
