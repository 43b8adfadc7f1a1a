"""A ring of ranks: what each receives, and how many sends that takes."""

from __future__ import annotations

import pytest
import torch

from ascend_run.ops.transfer.ring import Packing
from ascend_run.testing.pool import GlooPool

from . import ring_jobs as jobs
from .ring_jobs import mark


@pytest.mark.parametrize("by", [1, -1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_buffer_comes_from_as_many_ranks_behind_in_one_message(
    gloo_pool: GlooPool, world_size: int, by: int
) -> None:
    outcomes = gloo_pool.run(jobs.passed, world_size, by)
    for rank, (received, messages, sent_bytes) in enumerate(outcomes):
        source = (rank - by) % world_size
        assert torch.equal(received, mark(source))
        assert messages == (source != rank)
        assert sent_bytes == messages * mark(0).nbytes


@pytest.mark.parametrize("by", [1, -1])
def test_every_rank_sees_every_buffer_and_its_own_last(gloo_pool: GlooPool, by: int) -> None:
    for rank, seen in enumerate(gloo_pool.run(jobs.all_the_way, 4, by)):
        expected = [mark((rank - by * (step + 1)) % 4) for step in range(4)]
        assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))


def test_two_rings_may_turn_at_once(gloo_pool: GlooPool) -> None:
    for rank, (first, second) in enumerate(gloo_pool.run(jobs.two_at_once, 4)):
        assert torch.equal(first, mark((rank + 1) % 4))
        assert torch.equal(second, -mark((rank + 1) % 4))


def test_neighbours_are_those_in_the_group(gloo_pool: GlooPool) -> None:
    for rank, received in enumerate(gloo_pool.run(jobs.in_a_part_of_the_ranks, 4)):
        assert torch.equal(received, mark((rank + 2) % 4))


@pytest.mark.parametrize("batch", [(3,), ()], ids=["batched", "packed"])
def test_tensors_lie_in_one_buffer_heads_first_and_come_out_as_they_were(
    batch: tuple[int, ...],
) -> None:
    keys, values = torch.randn(6, *batch, 2, 5), torch.randn(6, *batch, 2, 4)
    packing = Packing([keys.shape, values.shape])
    flat = packing.pack([keys, values])
    assert flat.shape == (keys.numel() + values.numel(),)
    assert all(torch.equal(a, b) for a, b in zip(packing.views(flat), (keys, values), strict=True))
    assert torch.equal(flat[: keys.numel()], keys.movedim(0, -2).flatten())


def test_views_of_a_buffer_are_the_buffer() -> None:
    packing = Packing([(2, 1, 3), (4, 2, 1)])
    flat = torch.zeros(packing.numel)
    for number, view in enumerate(packing.views(flat)):
        view.add_(number + 1)
    assert flat.tolist() == [1.0] * 6 + [2.0] * 8
