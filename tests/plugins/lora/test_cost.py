"""Adapters are what is trained, and the plan knows their sizes."""

from __future__ import annotations

import pytest

from ascend_run.plugin_api.testing.models import DENSE
from tests.support.costs import planned


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
