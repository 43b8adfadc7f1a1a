"""A model with empty layer slots is bitwise equal to the model of its layers alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from ascend_run.testing.parity import Case
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import RankOutcome, run_trial

LAYOUTS: list[dict[str, int]] = [{}, {"dp": 2}, {"tp": 2}]
PIPELINES: list[tuple[dict[str, int], dict[str, Any], int, list[int]]] = [
    # Includes a stage with only an embedding or output layer.
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
) -> list[RankOutcome]:
    case = Case(plugins=(), model=model, layout=layout, config=config)
    names = ("noop-layers",) if "plugins.noop-layers.layers" in config else ()
    return pool.run(run_trial, case.world_size, case.trial(names, steps=steps, sharded=True))


def assert_equal(got: list[RankOutcome], want: list[RankOutcome]) -> None:
    for one, other in zip(got, want, strict=True):
        assert one.losses == other.losses
        assert one.grad_norms == other.grad_norms
        shards = {(shard.name, shard.offset): shard for shard in one.shards}
        expected = {(shard.name, shard.offset): shard for shard in other.shards}
        assert shards.keys() == expected.keys()
        for key, shard in expected.items():
            assert torch.equal(shards[key].tensor, shard.tensor), key


def compare(
    pool: GlooPool,
    model: str,
    layout: Mapping[str, int],
    config: Mapping[str, Any],
    layers: int,
    empty: list[int],
) -> None:
    padded = {
        **config,
        "model.num_layers": layers + len(empty),
        "plugins.noop-layers.layers": empty,
    }
    plain = {**config, "model.num_layers": layers}
    for steps in (0, 3):
        assert_equal(
            outcomes(pool, model, layout, padded, steps),
            outcomes(pool, model, layout, plain, steps),
        )


@pytest.mark.exhaustive(by=lambda layout, model: [model, bool(layout)])
@pytest.mark.parametrize("model", ["dense", "moe"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_empty_slots_change_no_bit(gloo_pool: GlooPool, layout: dict[str, int], model: str) -> None:
    compare(gloo_pool, model, layout, {}, 2, [0, 2, 4])


@pytest.mark.exhaustive(by=lambda config: config)
@pytest.mark.parametrize(("layout", "config", "layers", "empty"), PIPELINES, ids=str)
def test_empty_slots_of_a_pipeline_change_no_bit(
    gloo_pool: GlooPool,
    layout: dict[str, int],
    config: dict[str, Any],
    layers: int,
    empty: list[int],
) -> None:
    compare(gloo_pool, "dense", layout, config, layers, empty)


@pytest.mark.exhaustive(by=lambda: ())
@pytest.mark.parametrize("method", ["uniform", "block"])
def test_full_recomputation_goes_with_them(gloo_pool: GlooPool, method: str) -> None:
    recompute = {
        "model.recompute_granularity": "full",
        "model.recompute_method": method,
        "model.recompute_num_layers": 1,
    }
    compare(gloo_pool, "dense", {}, recompute, 2, [0, 2])
