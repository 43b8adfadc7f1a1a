"""Built-in features enabled together, as sampled from the campaign; and those of the demo.

The campaign ``together`` has every pair in every layout.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any, Final

import pytest

from ascend_run.testing.parity import Parity
from benchmarks.campaigns import feature_sets, together
from benchmarks.campaigns.campaign import PASSED
from benchmarks.campaigns.features import OPTIONS, settled
from tests.support.exhaustive import covering

PARTS = 8
"""Number of tests over which the sets are distributed: one each, as there are eight."""
SLOW = "compile"
"""Takes longer than all other features of a set; its own suite has sets with it."""


LAYOUTS: Final = (("moe", {"cp": 2, "ep": 2}), ("dense", {"tp": 2, "cp": 2}))


@functools.cache
def drawn() -> list[str]:
    """Return sets of these layouts, without full recompute, that together have every feature;
    building the sets of all layouts takes half a minute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature_sets, "LAYOUTS", LAYOUTS)
        patch.setattr(feature_sets, "IN_EACH_LAYOUT", ({},))
        patch.setattr(together, "all_sets", feature_sets.all_sets.__wrapped__)
        cases = [json.loads(case) for case in together.cases(together.CAMPAIGN.seed)]
    for asked in cases:
        asked["plugins"] = [name for name in asked["plugins"] if name != SLOW]
    runs = [case for case in cases if not case.get("refused") and case["plugins"]]
    chosen = covering({json.dumps(case, sort_keys=True): names_in(case) for case in runs})
    return [smaller(json.loads(case)) for case in chosen]


def smaller(case: dict[str, Any]) -> str:
    """Return the case with as few layers as show what the campaign's four do: one is fetched while
    another is computed, or left out beside two."""
    layers = 3 if names_in(case) & {"noop-layers", "swap-attention"} else 2
    return json.dumps({**case, "config": {**case["config"], "model.num_layers": layers}})


def names_in(case: Mapping[str, Any]) -> set[str]:
    return {*case["plugins"], *case["beside"]}


@pytest.mark.exhaustive(by=lambda part: [part % 2])
@pytest.mark.parametrize("part", range(PARTS))
def test_sets_of_the_campaign_are_at_parity(
    monkeypatch: pytest.MonkeyPatch, parity: Parity, part: int
) -> None:
    monkeypatch.setattr(together, "_parity", lambda: parity)  # the ranks of this session
    monkeypatch.setattr(together, "new_parity", lambda: parity)
    for case in drawn()[part::PARTS]:
        assert together.run(case) == {"verdict": PASSED, "compared": True}, case


def test_all_drawn_sets_have_every_feature() -> None:
    found = set[str]().union(*(names_in(json.loads(case)) for case in drawn()))
    assert {*settled()} - found <= {SLOW}


@pytest.mark.needs_plugins("ulysses", "gmm", "swap-attention")
@pytest.mark.exhaustive(by=lambda layout: layout)
@pytest.mark.parametrize(
    "layout", [{}, {"cp": 2, "ep": 2}, {"cp": 2, "dp": 2, "ep": 2}], ids=["1", "2", "4"]
)
def test_the_features_of_the_demo_are_at_parity_together(
    parity: Parity, layout: dict[str, int]
) -> None:
    names = ("ulysses", "gmm", "swap-attention")
    options = {**OPTIONS, "plugins.gmm.backend": "bmm"}
    for outcome in parity(names, model="moe", layout=layout, options=options):
        assert outcome.metrics["swap-attention/swap_bytes"] > 0
        assert outcome.operations["bmm"] > 0
        assert any("alltoall" in name for name in outcome.collectives) is bool(layout)
