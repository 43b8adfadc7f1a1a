"""All plugins of experts that go together, with experts sharded in both ways."""

from __future__ import annotations

from itertools import combinations
from typing import Any, Final

import pytest

from ascend_run.testing.models import MOE, trial_layout
from ascend_run.testing.parity import Parity
from benchmarks.campaigns.covering import pairs_of
from benchmarks.campaigns.features import catalogue, features, resolution_of
from benchmarks.campaigns.setting import Setting
from tests.support.needed_plugins import case
from tests.support.small_runs import prepare

LAYOUT: Final = {"tp": 2, "dp": 2, "ep": 2, "expt_tp": 2}
TWO_SHARED: Final = {"plugins.shared-experts.count": 2, "plugins.shared-experts.gate": True}
ACCUMULATED: Final = {"plugins.gmm.gradient_accumulation_fusion": True}
CROWDED: Final = {"plugins.moe-adaptive-recompute.scale": 0.5}
GATHERED: Final = {"model.moe_token_dispatcher_type": "allgather"}
KEEPS: Final = {
    "model.moe_expert_capacity_factor": 1.99,  # which drops no token
    "model.moe_pad_expert_input_to_capacity": True,
}
SETS: Final = [
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
        GATHERED,
        {**ACCUMULATED, **CROWDED},
    ),
    case(("moe-bmm-fused", "moe-permute-fusion", "shared-experts"), KEEPS, {}),
]
FURTHER: Final = [
    case(("gmm", "moe-allgather", "moe-zero-memory", "shared-experts"), GATHERED, ACCUMULATED),
    case(
        ("gmm", "moe-alltoall", "moe-permute-fusion", "moe-adaptive-recompute", "shared-experts"),
        {},
        {**ACCUMULATED, **CROWDED},
    ),
]
"""With the pairs that the others lack."""
ALL: Final = frozenset().union(*(entry.values[0] for entry in (*SETS, *FURTHER)))
APART: Final = frozenset({"hot-experts", "moe-tp-extend-ep"})
"""They need whole experts."""


@pytest.mark.exhaustive(by=lambda plugins: plugins)
@pytest.mark.parametrize(("plugins", "config", "options"), SETS, ids=str)
def test_loss_gradients_and_weights_are_those_of_one_rank(
    parity: Parity, plugins: tuple[str, ...], config: dict[str, Any], options: dict[str, Any]
) -> None:
    assert_at_parity(parity, plugins, config, options)


@pytest.mark.exhaustive(by=lambda plugins: {*plugins} & {"moe-adaptive-recompute"})
@pytest.mark.parametrize(("plugins", "config", "options"), FURTHER, ids=str)
def test_further_pairs_have_the_loss_gradients_and_weights_of_one_rank(
    parity: Parity, plugins: tuple[str, ...], config: dict[str, Any], options: dict[str, Any]
) -> None:
    assert_at_parity(parity, plugins, config, options)


def assert_at_parity(
    parity: Parity, plugins: tuple[str, ...], config: dict[str, Any], options: dict[str, Any]
) -> None:
    values = {**MOE, **trial_layout(LAYOUT), **config, **TWO_SHARED, **options}
    assert not prepare(values, plugins, 4).plan.idle
    parity(plugins, model="moe", layout=LAYOUT, config=config, options={**TWO_SHARED, **options})


@pytest.mark.needs_plugins(*ALL, *APART)
def test_every_pair_that_planning_allows_is_in_a_set() -> None:
    """Of all plugins of experts, and of those of memory that are for experts."""
    setting = Setting(model="moe", layout=LAYOUT, config={})
    names = [name for name in features() if _is_of_experts(name)]
    assert {name for name in names if setting.examine((name,)).problems} == APART
    allowed = {
        frozenset(pair)
        for pair in combinations(names, 2)
        if resolution_of(pair) and not setting.examine(pair).problems
    }
    assert allowed
    assert allowed <= pairs_of(entry.values[0] for entry in (*SETS, *FURTHER))


def _is_of_experts(name: str) -> bool:
    module = catalogue().load([name])[name].__module__
    return module.startswith(("ascend_run.plugins.experts.", "ascend_run.plugins.memory.moe_"))
