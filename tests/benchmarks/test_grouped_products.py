"""The measurement of the padding that a batched GEMM tolerates."""

from __future__ import annotations

import pytest
import torch

from ascend_run.ops.experts.grouped_matmul import GROUPS, Backend
from benchmarks.grouped_products import PADDINGS, ROWS, counts_of, measure, tolerated


def seconds(**times: float) -> dict[Backend, float]:
    return {"grouped_mm": times["grouped"], "bmm": times["bmm"], "loop": times["loop"]}


def test_counts_have_the_mean_and_the_padding() -> None:
    assert counts_of(4, 2.0, groups=3) == [8, 2, 2]
    assert counts_of(4, 1.25, groups=3) == [5, 4, 3]
    for rows in ROWS:
        for padding in PADDINGS:
            counts = counts_of(rows, padding)
            assert (sum(counts), max(counts)) == (64 * rows, padding * rows)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({1.0: 0.9, 1.5: 0.9, 2.0: 0.9}, 2.0),
        ({1.0: 0.9, 1.5: 0.9, 2.0: 0.98}, 1.5),  # hardly faster
        ({1.0: 0.9, 1.5: 1.2, 2.0: 0.9}, 1.0),  # faster again by chance
        ({1.0: 1.2, 1.5: 0.9}, 0.0),
    ],
)
def test_padding_is_tolerated_as_far_as_the_batched_gemm_is_faster(
    times: dict[float, float], expected: float
) -> None:
    for faster in ("grouped", "loop"):
        others = {"grouped": 1.5, "loop": 1.5} | {faster: 1.0}
        found = {padding: seconds(bmm=bmm, **others) for padding, bmm in times.items()}
        assert tolerated(found) == expected


def test_every_backend_is_timed() -> None:
    times = measure(torch.float32, counts_of(4, 1.5, groups=4), repeats=1, width=16)
    assert times.keys() == GROUPS.keys()
    assert min(times.values()) > 0
