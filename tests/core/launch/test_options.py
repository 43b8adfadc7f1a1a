from __future__ import annotations

import pytest

from ascend_run.core.launch.options import LaunchOptions
from ascend_run.plugin_api import ConfigError


def test_the_world_is_every_rank_of_every_node() -> None:
    options = LaunchOptions(nproc=4, nnodes=3, rdzv_endpoint="host:1234", node_rank=2)
    assert options.world_size == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nnodes": 2}, "--nnodes 2 needs --rdzv-endpoint HOST:PORT"),
        ({"rdzv_endpoint": "host:1"}, "--rdzv-endpoint host:1 needs --nnodes above 1"),
        ({"nnodes": 2, "rdzv_endpoint": "host"}, "--rdzv-endpoint host: expected HOST:PORT"),
        (
            {"nnodes": 2, "rdzv_endpoint": "host:1", "node_rank": 2},
            "--node-rank 2 must be from 0 to 1",
        ),
    ],
)
def test_options_that_contradict_one_another_are_refused(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LaunchOptions(**options)
