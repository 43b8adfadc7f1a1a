"""Adapters are what is trained, and the plan knows their sizes."""

from __future__ import annotations

import pytest

from ascend_run.plugin_api.testing.models import DENSE
from ascend_run.plugin_api.testing.pool import GlooPool
from tests.support.costs import planned
from tests.support.messages import differences


@pytest.mark.parametrize(
    ("targets", "width"),
    [
        (["linear_proj"], 32 + 32),
        (["linear_q"], 32 + 32),
        (["linear_fc1_up", "linear_fc2"], (32 + 48) + (48 + 32)),
        (["all-linear"], (3 * 32 + 32 + 2 * 8) + (32 + 32) + (2 * 32 + 96) + (48 + 32)),
    ],
)
def test_only_adapters_are_trained(targets: list[str], width: int) -> None:
    _, (plain,) = planned(DENSE)
    config = {**DENSE, "plugins.lora.target_modules": targets, "plugins.lora.rank": 4}
    _, (cost,) = planned(config, ("lora",))
    assert cost.trained_parameters == 2 * 4 * width
    assert cost.parameters == plain.parameters + cost.trained_parameters
    assert cost.memory.optimizer < plain.memory.optimizer / 2


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_adapters_send_what_was_expected(gloo_pool: GlooPool, sequence_parallel: bool) -> None:
    config = {
        **DENSE,
        "data.seq_length": 64,
        "parallel.tensor_model_parallel_size": 2,
        "parallel.sequence_parallel": sequence_parallel,
        "plugins.lora.target_modules": ["linear_q", "linear_proj", "linear_fc1"],
    }
    assert differences(gloo_pool, config, ("lora",)) == []
