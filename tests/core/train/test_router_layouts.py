"""Routers whose result goes by the tokens of all ranks: forward and gradients in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ascend_run.testing.models import MOE
from ascend_run.testing.parity import Parity
from ascend_run.testing.pool import GlooPool
from tests.core.train.runs import Runs

ROUTERS: dict[str, dict[str, Any]] = {
    "a loss of each sequence": {
        "model.moe_router_load_balancing_type": "seq_aux_loss",
        "model.moe_aux_loss_coeff": 1.0,
        "train.micro_batch_size": 2,
    },
    "sinkhorn": {
        "model.moe_router_load_balancing_type": "sinkhorn",
        "model.moe_router_pre_softmax": True,
        "model.moe_aux_loss_coeff": 0.0,
    },
}


@pytest.mark.needs_plugins("ulysses")
@pytest.mark.exhaustive
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("layout", [{"tp": 2, "ep": 2}, {"cp": 2}, {"dp": 2}], ids=str)
def test_every_layout_balances_as_one_rank_does(
    parity: Parity, router: str, layout: dict[str, int]
) -> None:
    plugins = ("ulysses",) if "cp" in layout else ()
    parity(plugins, model="moe", layout=layout, config=ROUTERS[router])


def test_a_run_with_a_router_that_draws_is_resumed(gloo_pool: GlooPool, tmp_path: Path) -> None:
    draws = {
        "model.moe_input_jitter_eps": 0.1,
        "model.moe_sparsemixer_eps": 0.3,
        "model.moe_sparsemixer_sampling": True,
    }
    runs = Runs(gloo_pool, tmp_path, ({**MOE, **draws}, 1, ()))
    runs.assert_the_same_in_two_halves()
