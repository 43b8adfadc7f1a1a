"""Exchanges against slices of the whole tensor, bit for bit."""

from __future__ import annotations

import pytest
import torch

from ascend_run.plugin_api.testing.pool import GlooPool

from . import all_to_all_jobs as jobs


@pytest.mark.parametrize("packed", [False, True], ids=["batched", "packed"])
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32,),
        (torch.float64, torch.float64, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float64, torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_tensors_of_any_dtypes_travel_in_one_message_each_way(
    gloo_pool: GlooPool, world_size: int, dtypes: tuple[torch.dtype, ...], packed: bool
) -> None:
    for messages, right in gloo_pool.run(jobs.together, world_size, dtypes, packed):
        assert messages == 2
        assert right == [True] * (2 * len(dtypes))


@pytest.mark.parametrize(("heads", "repeat"), [(1, 4), (2, 2), (4, 1), (3, 4)])
def test_a_repeated_head_lies_beside_its_copies(
    gloo_pool: GlooPool, heads: int, repeat: int
) -> None:
    assert all(gloo_pool.run(jobs.repeated_heads, 4, heads, repeat))
