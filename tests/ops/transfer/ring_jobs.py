"""Ring sends of buffers on a rank."""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.transfer.ring import pass_on
from ascend_run.testing.effects import count_collectives


def mark(rank: int) -> Tensor:
    return torch.arange(6, dtype=torch.float64) + 100 * rank


def passed(by: int) -> tuple[Tensor, int, int]:
    """Return the received buffer, and the number and bytes of sends."""
    with count_collectives() as seen:
        received = pass_on(mark(dist.get_rank()), dist.group.WORLD, by=by).wait()
    return received, seen.calls["send"], seen.sent_bytes["send"]


def all_the_way(by: int) -> list[Tensor]:
    """Return every buffer received while it travels around the full ring."""
    group = dist.group.WORLD
    held, seen = mark(group.rank()), []
    for _ in range(group.size()):
        held = pass_on(held, group, by=by).wait()
        seen.append(held.clone())
    return seen


def two_at_once() -> tuple[Tensor, Tensor]:
    """Two sends in flight between the same ranks, waited for in reverse order."""
    group = dist.group.WORLD
    first = pass_on(mark(group.rank()), group, by=-1)
    second = pass_on(-mark(group.rank()), group, by=-1, tag=1)
    later = second.wait()
    return first.wait(), later


def in_a_part_of_the_ranks() -> Tensor:
    """Ranks 1, 3 of four form one ring, and 0, 2 another."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return pass_on(mark(rank), groups[rank % 2]).wait()
