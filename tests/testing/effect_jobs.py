"""Collectives whose messages the tests know."""

from __future__ import annotations

import torch
from torch import distributed as dist

from ascend_run.testing.effects import Collectives, count_collectives


def known_messages() -> Collectives:
    four, eight = torch.ones(4), torch.ones(8, dtype=torch.float64)
    with count_collectives() as seen:
        dist.all_reduce(four)
        dist.all_reduce(four)
        dist.all_to_all_single(torch.empty_like(eight), eight)
        dist.all_gather_into_tensor(torch.empty(8), four)
    dist.all_reduce(four)  # outside: not counted
    return seen


def messages_of_pairs() -> Collectives:
    """A reduction with the rank that is two away, and one with all."""
    pairs = [dist.new_group([first, first + 2]) for first in range(2)]
    with count_collectives() as seen:
        dist.all_reduce(torch.ones(4), group=pairs[dist.get_rank() % 2])
        dist.all_reduce(torch.ones(4))
    return seen
