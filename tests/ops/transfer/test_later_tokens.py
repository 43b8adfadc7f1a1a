"""Fields of a batch shifted by some tokens, against a loop over positions."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ascend_run.ops.transfer.later_tokens import later_tokens
from ascend_run.testing.pool import GlooPool


class _ZigZag:
    """Rank r holds chunks r and 2 * size - 1 - r."""

    multiple = 2

    def chunks(self, length: int, rank: int, size: int) -> list[tuple[int, int]]:
        each = length // (2 * size)
        return [(n * each, (n + 1) * each) for n in (rank, 2 * size - 1 - rank)]


def shift_on_rank(ends: tuple[int, ...] | None) -> list[dict[str, Tensor]]:
    """Job: this rank's shard of a batch of 2 rows of 16, shifted by 1, 2 and 3."""
    rank, size = dist.get_rank(), dist.get_world_size()
    order = [i for begin, end in _ZigZag().chunks(16, rank, size) for i in range(begin, end)]
    ids = torch.stack((torch.arange(1, 17), torch.arange(101, 117)))[:, order]
    fields = {"ids": ids, "mask": torch.ones(2, 16)[:, order]}
    return list(later_tokens(fields, 3, ends, _ZigZag(), dist.group.WORLD))


@pytest.mark.parametrize("ends", [None, (4, 9, 16)], ids=["one document", "documents"])
def test_shifts_cross_ranks_and_stop_at_document_ends(
    gloo_pool: GlooPool, ends: tuple[int, ...] | None
) -> None:
    shards = gloo_pool.run(shift_on_rank, 2, ends, timeout=60)
    for depth in (1, 2, 3):
        for rank, shard in enumerate(shards):
            order = [i for begin, end in _ZigZag().chunks(16, rank, 2) for i in range(begin, end)]
            last = [next(end for end in ends or (16,) if end > i) for i in order]
            inside = [i + depth < end for i, end in zip(order, last, strict=True)]
            found = shard[depth - 1]
            assert found["mask"].tolist() == [[float(i) for i in inside]] * 2
            for row, start in zip(found["ids"].tolist(), (1, 101), strict=True):
                wanted = [
                    (start + i + depth) * there for i, there in zip(order, inside, strict=True)
                ]
                assert row == wanted
