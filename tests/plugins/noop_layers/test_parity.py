"""A model with empty places is the model of its layers alone, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from ascend_run.plugin_api import Claim, Numerics
from ascend_run.plugin_api.testing.parity import Case
from ascend_run.plugin_api.testing.pool import GlooPool
from ascend_run.plugin_api.testing.runtime import RankOutcome, run_trial
from ascend_run.registry.discovery import discover
from ascend_run.registry.kinds import Kind, kind_of

LAYOUTS: list[dict[str, int]] = [{}, {"dp": 2}, {"tp": 2}]
PIPELINES: list[tuple[dict[str, int], dict[str, Any], int, list[int]]] = [
    # With a whole stage of nothing but the vocabulary's ends.
    ({"pp": 2}, {}, 2, [0, 3]),
    ({"pp": 2}, {}, 2, [1, 2]),
    ({"pp": 2}, {"parallel.virtual_pipeline_model_parallel_size": 2}, 4, [0, 3, 4, 7]),
]


def outcomes(
    pool: GlooPool,
    model: str,
    layout: Mapping[str, int],
    config: Mapping[str, Any],
    steps: int,
    beside: tuple[str, ...] = (),
) -> list[RankOutcome]:
    case = Case(plugins=(), model=model, layout=layout, config=config)
    names = (*beside, *(("noop-layers",) if "plugins.noop-layers.layers" in config else ()))
    return pool.run(run_trial, case.world_size, case.trial(names, steps=steps, sharded=True))


def assert_equal(got: list[RankOutcome], want: list[RankOutcome]) -> None:
    for one, other in zip(got, want, strict=True):
        assert one.losses == other.losses
        assert one.grad_norms == other.grad_norms
        assert one.missing == other.missing == ()
        pieces = {(piece.name, piece.offset): piece for piece in one.pieces}
        expected = {(piece.name, piece.offset): piece for piece in other.pieces}
        assert pieces.keys() == expected.keys()
        for key, piece in expected.items():
            assert torch.equal(pieces[key].tensor, piece.tensor), key


def compare(
    pool: GlooPool,
    model: str,
    layout: Mapping[str, int],
    config: Mapping[str, Any],
    layers: int,
    empty: list[int],
    beside: tuple[str, ...] = (),
) -> None:
    padded = {
        **config,
        "model.num_layers": layers + len(empty),
        "plugins.noop-layers.layers": empty,
    }
    plain = {**config, "model.num_layers": layers}
    for steps in (0, 3):
        assert_equal(
            outcomes(pool, model, layout, padded, steps, beside),
            outcomes(pool, model, layout, plain, steps, beside),
        )


@pytest.mark.parametrize("model", ["dense", "moe"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_empty_places_change_no_bit(
    gloo_pool: GlooPool, layout: dict[str, int], model: str
) -> None:
    compare(gloo_pool, model, layout, {}, 2, [0, 2, 4])


@pytest.mark.parametrize(("layout", "config", "layers", "empty"), PIPELINES, ids=str)
def test_the_empty_places_of_a_pipeline_change_no_bit(
    gloo_pool: GlooPool,
    layout: dict[str, int],
    config: dict[str, Any],
    layers: int,
    empty: list[int],
) -> None:
    compare(gloo_pool, "dense", layout, config, layers, empty)


@pytest.mark.parametrize("method", ["uniform", "block"])
def test_full_recomputation_goes_with_them(gloo_pool: GlooPool, method: str) -> None:
    recompute = {
        "model.recompute_granularity": "full",
        "model.recompute_method": method,
        "model.recompute_num_layers": 1,
    }
    compare(gloo_pool, "dense", {}, recompute, 2, [0, 2])


def others() -> list[tuple[str, dict[str, int]]]:
    """Every other feature of ours that keeps the model, and a layout in which it has work."""
    catalogue = discover()
    ours = [name for name, found in catalogue.items() if found.first_party]
    classes = {plugin.manifest.name: plugin for plugin in catalogue.load(ours).values()}
    return [
        (name, {"cp": 2} if Claim.SEQUENCE_EXCHANGE in plugin.manifest.claims else {"dp": 2})
        for name, plugin in sorted(classes.items())
        if kind_of(plugin.manifest) is Kind.FEATURE
        and plugin.manifest.numerics is not Numerics.MODEL
    ]


@pytest.mark.parametrize(("name", "layout"), others(), ids=str)
def test_they_go_with_every_other_feature(
    gloo_pool: GlooPool, name: str, layout: dict[str, int]
) -> None:
    compare(gloo_pool, "moe", layout, {}, 2, [1, 2], (name,))
