"""Numbers of layers per rank that are more than some ranks have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pytest

from ascend_run.core.config.activation_policy import activation_policies
from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import Keeping
from ascend_run.testing.models import DENSE
from tests.support.costs import planned

OPTIONS: Final = {
    "recompute": "num_layers",
    "recompute-activation": "num_layers",
    "recompute-norm": "num_layers",
    "swap-attention": "recompute_mlp_layers",
}


@pytest.mark.needs_plugins(*OPTIONS, "noop-layers")
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    ("values", "world_size", "count", "layers"),
    [
        ({"model.num_layers_in_first_pipeline_stage": 1}, 2, 2, [0, 1, 2]),
        ({"model.num_layers_in_first_pipeline_stage": 1}, 2, 3, [0, 1, 2, 3]),
        ({"model.mtp_num_layers": 1}, 1, 4, [0, 1, 2, 3]),
        ({"model.mtp_num_layers": 1}, 1, 5, [0, 1, 2, 3, 4]),
        ({"plugins.noop-layers.layers": [1]}, 1, 2, [0, 2]),
        ({"plugins.noop-layers.layers": [1]}, 1, 4, [0, 2, 3]),
    ],
    ids=["uneven", "all of uneven", "not multi-token", "multi-token", "empty slot", "all but it"],
)
def test_a_rank_with_fewer_layers_treats_all(
    name: str, values: Mapping[str, Any], world_size: int, count: int, layers: list[int]
) -> None:
    config = {**DENSE, "model.num_layers": 4, **values, f"plugins.{name}.{OPTIONS[name]}": count}
    config["parallel.pipeline_model_parallel_size"] = world_size
    more = ["noop-layers"] if "plugins.noop-layers.layers" in values else []
    prepared, _ = planned(config, [name, *more], world_size)
    policies = activation_policies(prepared.config, Hooks(prepared.instances()))
    kept = (Keeping.RECOMPUTE, Keeping.DISCARD)
    treated = {
        layer: [how for _, how in policy.treated.values() if how.keeping in kept]
        for layer, policy in policies.items()
    }
    assert sorted(layer for layer, found in treated.items() if found) == layers
