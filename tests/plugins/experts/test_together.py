"""All plugins of experts that go together, with experts sharded in both ways."""

from __future__ import annotations

from typing import Any, Final

import pytest

from ascend_run.testing.models import MOE, trial_layout
from ascend_run.testing.parity import Parity
from tests.support.needed_plugins import case
from tests.support.small_runs import prepare

LAYOUT: Final = {"tp": 2, "dp": 2, "ep": 2, "expt_tp": 2}
TWO_SHARED: Final = {"plugins.shared-experts.count": 2, "plugins.shared-experts.gate": True}
ACCUMULATED: Final = {"plugins.gmm.gradient_accumulation_fusion": True}
KEEPS: Final = {
    "model.moe_expert_capacity_factor": 1.99,  # which drops no token
    "model.moe_pad_expert_input_to_capacity": True,
}


@pytest.mark.exhaustive(by=lambda plugins: plugins)
@pytest.mark.parametrize(
    ("plugins", "config", "options"),
    [
        case(
            ("gmm", "moe-alltoall", "moe-permute-fusion", "moe-zero-memory", "shared-experts"),
            {},
            ACCUMULATED,
        ),
        case(
            ("gmm", "moe-alltoall", "moe-permute-fusion", "shared-experts"),
            {},
            {
                **ACCUMULATED,
                "plugins.moe-alltoall.overlap_chunks": 2,
                "plugins.shared-experts.overlap": True,
            },
        ),
        case(
            ("gmm", "moe-allgather", "moe-adaptive-recompute", "shared-experts"),
            {"model.moe_token_dispatcher_type": "allgather"},
            {**ACCUMULATED, "plugins.moe-adaptive-recompute.scale": 0.5},
        ),
        case(("moe-bmm-fused", "moe-permute-fusion", "shared-experts"), KEEPS, {}),
    ],
    ids=str,
)
def test_loss_gradients_and_weights_are_those_of_one_rank(
    parity: Parity, plugins: tuple[str, ...], config: dict[str, Any], options: dict[str, Any]
) -> None:
    values = {**MOE, **trial_layout(LAYOUT), **config, **TWO_SHARED, **options}
    assert not prepare(values, plugins, 4).plan.idle
    parity(plugins, model="moe", layout=LAYOUT, config=config, options={**TWO_SHARED, **options})
