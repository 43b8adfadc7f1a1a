"""Features of ours enabled at once: drawn sets, which have every feature, and the largest ones; and
alone in the layouts that take more than one kind of parallelism, as drawn from the campaign.

The campaign ``together`` has every pair, and every feature alone in every layout.
"""

from __future__ import annotations

import json
import random

import pytest

from ascend_run.plugin_api import Numerics
from ascend_run.plugin_api.layout import world_size
from ascend_run.plugin_api.testing.parity import Parity
from ascend_run.registry.discovery import discover
from benchmarks.campaigns import together
from benchmarks.campaigns.campaign import PASSED
from benchmarks.campaigns.together import (
    CONFIG,
    OPTIONS,
    features,
    layout_of,
    layout_of_set,
    resolution_of,
)


def _drawn_sets() -> list[tuple[str, ...]]:
    """Sets of up to four, drawn until every feature is in one; those that are in none come first,
    and four ranks are enough."""
    draw, count = random.Random(1), len(features())
    seen: set[str] = set()
    kept = []
    for first in draw.sample(features(), count):
        others = sorted(draw.sample(features(), count), key=seen.__contains__)
        names: tuple[str, ...] = ()
        for name in () if first in seen else (first, *others):
            more = tuple(dict.fromkeys((*names, name)))
            if len(more) <= 4 and resolution_of(more) and world_size(layout_of_set(more)) <= 4:
                names = more
        seen.update(names)
        kept += [names] if names else []
    return kept


@pytest.mark.parametrize("names", _drawn_sets(), ids="+".join)
def test_sets_that_resolution_allows_are_at_parity(parity: Parity, names: tuple[str, ...]) -> None:
    config = {key: value for name in names for key, value in CONFIG.get(name, {}).items()}
    parity(names, model="moe", layout=layout_of_set(names), config=config, options=OPTIONS)


def _drawn_alone() -> list[str]:
    """A case of the campaign in each of its layouts with stages or of two kinds."""
    draw, known = random.Random(1), {*features()}
    by_layout: dict[str, list[str]] = {}
    for case in together.cases(0):
        asked = json.loads(case)
        axes = asked["layout"].keys() - {"dp"}
        names = {*asked["plugins"], *asked.get("beside", ())}
        if together.SWAP in names and together.RECOMPUTED.items() <= asked["config"].items():
            continue  # refused
        if len(asked["plugins"]) == 1 and names <= known and (len(axes) > 1 or "pp" in axes):
            by_layout.setdefault(str(asked["layout"]), []).append(case)
    return [draw.choice(of_layout) for of_layout in by_layout.values()]


@pytest.mark.parametrize("case", _drawn_alone())
def test_a_feature_in_a_layout_of_the_campaign_is_at_parity(
    monkeypatch: pytest.MonkeyPatch, parity: Parity, case: str
) -> None:
    monkeypatch.setattr(together, "_parity", lambda: parity)  # the ranks of this session
    assert together.run(case) == {"verdict": PASSED, "compared": True}


@pytest.mark.parametrize(("model", "ranks"), [("dense", 1), ("moe", 2), ("dense", 4), ("moe", 4)])
def test_the_largest_set_that_keeps_the_model_is_at_parity(
    parity: Parity, model: str, ranks: int
) -> None:
    names: tuple[str, ...] = ()
    for feature in features():
        manifest = discover().load([feature])[feature].manifest
        if manifest.numerics is not Numerics.MODEL and resolution_of((*names, feature)):
            names = (*names, feature)
    layout = layout_of(names, ranks)
    if model == "dense":
        layout.pop("ep", None)
    parity(names, model=model, layout=layout, options=OPTIONS)


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
