from __future__ import annotations

import os

import pytest

from ascend_run.core.launch.options import LaunchOptions, threads_per_rank
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


def test_cores_are_shared_among_ranks_unless_the_user_has_said_how() -> None:
    cores = len(os.sched_getaffinity(0))
    assert threads_per_rank(1, {}) == {}
    assert threads_per_rank(cores, {}) == {"OMP_NUM_THREADS": "1"}
    assert threads_per_rank(cores * 4, {}) == {"OMP_NUM_THREADS": "1"}
    assert threads_per_rank(2, {"OMP_NUM_THREADS": "7"}) == {}
