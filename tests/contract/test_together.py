"""Built-in features enabled together, as sampled from the campaign; and those of the demo.

The campaign ``together`` has every pair in every layout.
"""

from __future__ import annotations

import functools
import json
import random

import pytest

from ascend_run.testing.parity import Parity
from benchmarks.campaigns import together
from benchmarks.campaigns.campaign import PASSED
from benchmarks.campaigns.features import OPTIONS

NUM_SETS = 8
"""Number of sets that ``drawn`` returns."""
SLOW = "compile"
"""Takes longer than all other features of a set; its own suite has sets with it."""


@functools.cache
def drawn() -> list[str]:
    """Return sets, drawn until every feature is in one; building them takes seconds."""
    found, seen = [], set[str]()
    cases = [json.loads(case) for case in together.cases(together.CAMPAIGN.seed)]
    for asked in random.Random(1).sample(cases, len(cases)):
        names = {*asked["plugins"], *asked["beside"]}
        if not asked.get("refused") and names - seen - {SLOW}:
            asked["plugins"] = [name for name in asked["plugins"] if name != SLOW]
            seen |= names
            found.append(json.dumps(asked, sort_keys=True))
    return found


@pytest.mark.parametrize("index", range(NUM_SETS))
def test_a_set_of_the_campaign_is_at_parity(
    monkeypatch: pytest.MonkeyPatch, parity: Parity, index: int
) -> None:
    monkeypatch.setattr(together, "_parity", lambda: parity)  # the ranks of this session
    monkeypatch.setattr(together, "new_parity", lambda: parity)
    assert together.run(drawn()[index]) == {"verdict": PASSED, "compared": True}


def test_all_drawn_sets_run() -> None:
    assert len(drawn()) == NUM_SETS, "set NUM_SETS to this number"


@pytest.mark.needs_plugins("ulysses", "gmm", "swap-attention")
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
