"""Features of ours enabled at once: a sample of the campaign ``together``, and the largest sets.

The sample has every feature in it; the campaign has every pair.
"""

from __future__ import annotations

import random

import pytest

from ascend_run.plugin_api import Numerics
from ascend_run.plugin_api.testing.parity import Parity
from ascend_run.registry.discovery import discover
from benchmarks.campaigns.together import (
    CONFIG,
    OPTIONS,
    allowed_pairs,
    features,
    layout_of,
    layout_of_pair,
    resolution_of,
)


def _covering_pairs() -> list[tuple[str, ...]]:
    """Pairs drawn one by one, kept where one of the two was in none before."""
    drawn = random.Random(7).sample(allowed_pairs(), len(allowed_pairs()))
    seen: set[str] = set()
    kept = []
    for pair in drawn:
        if not seen.issuperset(pair):
            seen.update(pair)
            kept.append(pair)
    return kept


@pytest.mark.parametrize("names", _covering_pairs(), ids="+".join)
def test_pairs_that_resolution_allows_are_at_parity(parity: Parity, names: tuple[str, ...]) -> None:
    config = {key: value for name in names for key, value in CONFIG.get(name, {}).items()}
    parity(names, model="moe", layout=layout_of_pair(names), config=config, options=OPTIONS)


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
