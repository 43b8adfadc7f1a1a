"""Features of ours enabled at once: every set that resolution allows is at parity."""

from __future__ import annotations

from itertools import combinations

import pytest

from ascend_run.plugin_api import AscendRunError, Claim, Numerics
from ascend_run.plugin_api.testing.parity import Parity
from ascend_run.registry.discovery import discover
from ascend_run.registry.kinds import Kind
from ascend_run.registry.resolution import Resolution, resolve

CATALOGUE = discover()
OPTIONS = {
    "plugins.swap-attention.min_bytes": 1,  # a tiny model's tensors are small
    "plugins.noop-layers.layers": [1],
    "plugins.lora.export": False,
}
CONFIG = {"noop-layers": {"model.num_layers": 3}}
"""Feature -> what the model must be for it."""


def _features() -> list[str]:
    """Ours. One that changes the model is held against itself alone, on one rank."""
    classes = CATALOGUE.load(
        name
        for name, found in CATALOGUE.items()
        if found.first_party and found.kind is Kind.FEATURE
    )
    return sorted({plugin.manifest.name for plugin in classes.values()})


def _resolution(names: tuple[str, ...]) -> Resolution | None:
    try:
        return resolve(names, CATALOGUE.load(names))
    except AscendRunError:
        return None


def _pairs() -> list[tuple[str, ...]]:
    return [pair for pair in combinations(_features(), 2) if _resolution(pair)]


def _layout(names: tuple[str, ...], ranks: int) -> dict[str, int]:
    """Experts spread over two ranks; the sequence too where somebody owns its exchange."""
    resolution = _resolution(names)
    assert resolution is not None
    if ranks == 1:
        return {}
    if Claim.SEQUENCE_EXCHANGE in resolution.owners:
        return {"cp": 2, "dp": ranks // 2, "ep": 2}
    return {"dp": ranks, "ep": 2}


@pytest.mark.parametrize("names", _pairs(), ids="+".join)
def test_every_pair_that_resolution_allows_is_at_parity(
    parity: Parity, names: tuple[str, ...]
) -> None:
    config = {key: value for name in names for key, value in CONFIG.get(name, {}).items()}
    parity(names, model="moe", layout=_layout(names, 2), config=config, options=OPTIONS)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("model", ["dense", "moe"])
def test_the_largest_set_that_keeps_the_model_is_at_parity(
    parity: Parity, model: str, ranks: int
) -> None:
    names: tuple[str, ...] = ()
    for feature in _features():
        manifest = CATALOGUE.load([feature])[feature].manifest
        if manifest.numerics is not Numerics.MODEL and _resolution((*names, feature)):
            names = (*names, feature)
    layout = _layout(names, ranks)
    if model == "dense":
        layout.pop("ep", None)
    parity(names, model=model, layout=layout, options=OPTIONS)
