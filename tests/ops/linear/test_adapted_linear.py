"""A parallel linear with its adapter against the formula on full tensors; the order of its work."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ascend_run.ops.linear.adapted_linear import Schedule, adapted_linear
from ascend_run.ops.linear.parallel_linear import LinearCollectives
from ascend_run.testing.pool import GlooPool

from . import adapted_linear_jobs as jobs
from .made_weight import MadeWeight

COLUMN, COLUMN_SEQUENCE = LinearCollectives.COLUMN, LinearCollectives.COLUMN_SEQUENCE
ROW, ROW_SEQUENCE = LinearCollectives.ROW, LinearCollectives.ROW_SEQUENCE
SPLIT = (COLUMN, COLUMN_SEQUENCE, ROW, ROW_SEQUENCE)


@pytest.mark.exhaustive(by=lambda ranks, kind: [ranks, kind.collectives])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "kind",
    [
        jobs.Kind(collectives=collectives, **more)
        for collectives in SPLIT
        for more in (
            {"slices": 1},
            {"slices": 2},
            {"slices": 5, "length": 4},
            {"merges": True},
            {"reads_another": True},
        )
    ],
    ids=str,
)
def test_output_and_gradients_are_those_of_full_tensors(
    gloo_pool: GlooPool, ranks: int, kind: jobs.Kind
) -> None:
    named = {*jobs.NAMES} if kind.reads_another else {*jobs.NAMES} - {"dadapter_x"}
    for found in gloo_pool.run(jobs.errors, ranks, kind):
        assert {*found} == named
        assert max(found.values()) < 1e-13, found


def words(line: str) -> list[str]:
    return [word.strip() for word in line.split(",")]


@pytest.mark.parametrize(
    ("kind", "forward", "backward"),
    [
        (
            jobs.Kind(collectives=COLUMN_SEQUENCE, slices=1),
            "gather K, m, gather R, wait K, W, wait R",
            "m, scatter R, W, scatter K, m, wait R, m, m, wait K",
        ),
        (
            jobs.Kind(collectives=COLUMN_SEQUENCE, slices=2),
            "gather K, m, gather R, gather K, wait K, W, wait K, W, wait R",
            "m, scatter R, W, scatter K, W, scatter K, m, wait R, m, m, wait K, wait K",
        ),
        (
            jobs.Kind(collectives=COLUMN_SEQUENCE, slices=1, merges=True),
            "gather K, m, m, wait K, W",
            "gather R, m, scatter R, m, W, scatter K, wait R, m, wait R, m, wait K",
        ),
        (
            jobs.Kind(collectives=ROW_SEQUENCE, slices=1),
            "m, scatter R, W, scatter N, wait R, m, wait N",
            "gather N, m, wait N, W, m, m, m",
        ),
        (
            jobs.Kind(collectives=ROW_SEQUENCE, slices=2),
            "m, scatter R, W, scatter N, W, scatter N, wait R, m, wait N, wait N",
            "gather N, m, gather N, wait N, W, wait N, W, m, m, m",
        ),
        (
            jobs.Kind(collectives=COLUMN, slices=2),
            "m, W",
            "m, reduce R, W, reduce K, W, reduce K, m, wait R, m, m, wait K, wait K",
        ),
        (
            jobs.Kind(collectives=ROW, slices=2),
            "m, reduce R, W, reduce N, W, reduce N, wait R, m, wait N, wait N",
            "m, W, m, m, m",
        ),
    ],
    ids=str,
)
def test_collectives_are_launched_before_matmuls_and_awaited_after(
    gloo_pool: GlooPool, kind: jobs.Kind, forward: str, backward: str
) -> None:
    for found in gloo_pool.run(jobs.sequence, 2, kind):
        assert found == (words(forward), words(backward))


def call(*, merges: bool = False, trained: bool = False, another: bool = False) -> None:
    x, weight = torch.ones(4, 2), torch.ones(3, 2, requires_grad=trained)
    no_group: Any = None  # it is refused before any collective
    schedule = Schedule(collectives=COLUMN, group=no_group, merges=merges)
    other = x if another else None
    a, b = torch.ones(1, 2), torch.ones(1, 3)
    adapted_linear(x, lambda: weight, a, lambda: b, schedule, adapter_x=other)


def test_a_trained_weight_is_an_error() -> None:
    with pytest.raises(ValueError, match="is frozen; this one requires a gradient"):
        call(trained=True)


def test_an_adapter_with_its_own_input_cannot_be_merged() -> None:
    with pytest.raises(ValueError, match="reads another input cannot be merged"):
        call(merges=True, another=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_merged_weight_is_rounded_once(gloo_pool: GlooPool, dtype: torch.dtype) -> None:
    """An update below half a unit of the weight's last place is lost, and a larger one is kept."""
    for lost, kept in gloo_pool.run(jobs.merged_updates, 2, dtype):
        assert (lost, kept) == (0.0, 4 * torch.finfo(dtype).eps)


def test_a_weight_that_is_made_is_not_kept() -> None:
    """Of one that is stored in another form: it is made again in backward."""
    made = MadeWeight(torch.ones(3, 2))
    no_group: Any = None  # there are no collectives
    how = Schedule(collectives=LinearCollectives.NONE, group=no_group)
    a, b = torch.ones(1, 2, requires_grad=True), torch.ones(1, 3)
    out = adapted_linear(torch.ones(4, 2), made, a, lambda: b, how)
    assert (made.calls, made.living) == (1, 0)
    out.sum().backward()
    assert (made.calls, made.most, made.living) == (2, 1, 0)
