from __future__ import annotations

import pytest

from ascend_run.core.rank.rank_environment import (
    RankEnvironment,
    find_rank_environment,
    first_host,
)
from ascend_run.plugin_api import ConfigError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "41234",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[007-009],gpu020",
}


def test_alone_there_is_no_place() -> None:
    assert find_rank_environment({"PATH": "/bin", "MASTER_ADDR": "left over"}) is None


def test_a_rank_of_torchrun_is_that_rank() -> None:
    place = find_rank_environment(TORCHRUN)
    assert place is not None
    assert place.variables() == TORCHRUN


def test_a_task_of_srun_is_a_rank_of_its_step() -> None:
    place = find_rank_environment(SLURM)
    assert place == RankEnvironment(
        rank=5,
        world_size=8,
        local_rank=1,
        starter="SLURM",
        rendezvous={"MASTER_ADDR": "gpu007", "MASTER_PORT": "21234"},
    )


def test_the_three_variables_of_slurm_alone_are_enough() -> None:
    place = find_rank_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"})
    assert place is not None
    assert place.variables()["MASTER_ADDR"] == "127.0.0.1"


def test_a_batch_script_is_no_rank_of_its_job() -> None:
    batch = {name: value for name, value in SLURM.items() if "STEP" not in name}
    assert find_rank_environment(batch) is None


def test_what_torchrun_says_counts_over_the_job_around_it() -> None:
    place = find_rank_environment({**SLURM, **TORCHRUN})
    assert place is not None
    assert (place.rank, place.world_size) == (3, 4)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, 1),
        ({"LOCAL_RANK": None, "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, 2),
        ({"LOCAL_RANK": None, "SLURM_LOCALID": "0"}, 0),
        ({"LOCAL_RANK": None}, 3),
    ],
)
def test_the_local_rank_is_what_any_starter_calls_it(
    change: dict[str, str | None], expected: int
) -> None:
    environment = {k: v for k, v in {**TORCHRUN, **change}.items() if v is not None}
    place = find_rank_environment(environment)
    assert place is not None
    assert place.local_rank == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "4"}, "rank 4 is not below the world size 4"),
        ({"RANK": "-1"}, "rank -1 is not below"),
        ({"LOCAL_RANK": "-1"}, "local rank -1 is negative"),
        ({"RANK": "three"}, "RANK='three' in the environment is not an integer"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
        ({"MASTER_PORT": None}, "MASTER_PORT must be set if WORLD_SIZE=4"),
    ],
)
def test_an_invalid_environment_is_refused(change: dict[str, str | None], message: str) -> None:
    environment = {k: v for k, v in {**TORCHRUN, **change}.items() if v is not None}
    with pytest.raises(ConfigError, match=message):
        find_rank_environment(environment)


def test_one_rank_needs_no_place_to_meet() -> None:
    assert find_rank_environment({"RANK": "0", "WORLD_SIZE": "1"}) is not None


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("node[007-012,020],other", "node007"),
        ("a-b.c,d", "a-b.c"),
        ("n[3]", "n3"),
    ],
)
def test_the_first_host_of_a_slurm_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_a_rank_finds_its_coordinates_and_one_alone_needs_no_variables() -> None:
    rank = RankEnvironment.of_this_process({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"})
    assert (rank.rank, rank.world_size, rank.local_rank) == (3, 8, 1)
    alone = RankEnvironment.of_this_process({"PATH": "/bin"})
    assert (alone.rank, alone.world_size, alone.local_rank) == (0, 1, 0)
