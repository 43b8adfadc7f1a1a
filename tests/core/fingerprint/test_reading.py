"""What a step read has one hash in every layout, and another in another order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from ascend_run.core.data.batches import BatchPlan, micro_batches
from ascend_run.core.fingerprint.reading import RowHashes
from ascend_run.ops.hashing import MASK
from ascend_run.plugin_api import BatchField

FIELDS = {
    "tokens": BatchField(axes=("batch", "sequence")),
    "scores": BatchField(axes=("batch",)),
}


def sample(index: int) -> dict[str, Tensor]:
    return {
        "tokens": torch.arange(index, index + 4),
        "scores": torch.tensor(index / 3, dtype=torch.bfloat16),
    }


def hashes(
    samples: Sequence[dict[str, Tensor]], *, ranks: int = 1, micro_batch_size: int = 1
) -> list[int]:
    """Of two steps of four samples each, over all ranks."""
    totals = [0, 0]
    for rank in range(ranks):
        plan = BatchPlan(
            micro_batch_size=micro_batch_size, global_batch_size=4, dp_rank=rank, dp_size=ranks
        )
        rows = RowHashes(plan, owns=True)
        batches = rows.watch(micro_batches(samples, FIELDS, plan))
        for step in range(2):
            for _ in range(plan.num_microbatches):
                next(batches)
            totals[step] = (totals[step] + rows.take()) & MASK
    return totals


SAMPLES = [sample(index) for index in range(8)]


@pytest.mark.parametrize(("ranks", "size"), [(1, 2), (1, 4), (2, 1), (2, 2), (4, 1)])
def test_the_hash_does_not_depend_on_how_a_batch_is_distributed(ranks: int, size: int) -> None:
    assert hashes(SAMPLES, ranks=ranks, micro_batch_size=size) == hashes(SAMPLES)


def test_another_order_and_another_value_are_seen() -> None:
    base = hashes(SAMPLES)
    swapped = hashes([SAMPLES[1], SAMPLES[0], *SAMPLES[2:]])
    assert swapped[0] != base[0]
    assert swapped[1] == base[1]
    changed = [*SAMPLES[:5], {**SAMPLES[5], "scores": SAMPLES[4]["scores"]}, *SAMPLES[6:]]
    assert hashes(changed)[0] == base[0]
    assert hashes(changed)[1] != base[1]
    assert base[0] != base[1]


def test_ranks_that_read_what_another_counts_add_nothing() -> None:
    rows = RowHashes(BatchPlan(micro_batch_size=1, global_batch_size=2), owns=False)
    plan = BatchPlan(micro_batch_size=1, global_batch_size=2)
    assert len([*rows.watch(micro_batches(SAMPLES, FIELDS, plan))]) == 8
    assert rows.take() == 0
