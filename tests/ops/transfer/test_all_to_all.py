"""All-to-alls against slices of the full tensor, bitwise."""

from __future__ import annotations

import pytest
import torch

from ascend_run.ops.attention.head_shares import HeadRanges, parts
from ascend_run.testing.pool import GlooPool

from . import all_to_all_jobs as jobs


@pytest.mark.exhaustive
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


REGULAR = ((0, 1), (0, 1), (1, 2), (1, 2))
"""Two heads, each on two of four ranks."""
FIRST_HAS_MORE = ((0, 2), (2, 4), (4, 5), (5, 6))
OVERLAPPING = ((0, 1), (0, 2), (1, 3), (2, 3))


@pytest.mark.parametrize("lengths", [None, (4, 3, 3, 2)], ids=["even", "uneven"])
@pytest.mark.parametrize(
    "head_ranges",
    [
        (parts(8, 4), REGULAR, REGULAR),
        (FIRST_HAS_MORE, OVERLAPPING, parts(4, 4)),
        (((0, 2), (1, 3), (2, 4), (3, 5)), parts(4, 4)),
    ],
    ids=["regular", "irregular", "as-many-each"],
)
def test_ranks_may_share_heads_and_hold_parts_of_other_lengths(
    gloo_pool: GlooPool, head_ranges: tuple[HeadRanges, ...], lengths: tuple[int, ...] | None
) -> None:
    heads = tuple(ranges[-1][1] for ranges in head_ranges)
    for messages, right in gloo_pool.run(jobs.shared_out, 4, heads, head_ranges, lengths):
        assert messages == 2
        assert right == [True] * (2 * len(head_ranges))
