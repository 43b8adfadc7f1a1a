"""Parallel linears by every kind of matmul against the unsharded formula, with gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ascend_run.ops.linear import sliced_matmul
from ascend_run.ops.linear import weight_gradient as gradients
from ascend_run.ops.linear.parallel_linear import LinearCollectives, linear_link
from ascend_run.ops.linear.weight_gradient import (
    matmul_add_fp32,
    plus_product,
    weight_gradient,
)
from ascend_run.testing.pool import GlooPool

from . import parallel_linear_jobs as jobs

KINDS = ("plain", "ring", "sliced 1", "sliced 2", "sliced 8")
SPLIT = (
    LinearCollectives.COLUMN,
    LinearCollectives.COLUMN_SEQUENCE,
    LinearCollectives.ROW,
    LinearCollectives.ROW_SEQUENCE,
)


def run(
    pool: GlooPool,
    ranks: int,
    name: str,
    exchange: LinearCollectives,
    *,
    frozen: bool = False,
    keep: bool = False,
    accumulate: bool = False,
    length: int = jobs.S,
) -> dict[str, Any]:
    outcomes = pool.run(jobs.linear, ranks, name, exchange, frozen, keep, accumulate, length)
    for outcome in outcomes:
        assert max(outcome["apart"].values()) < 1e-13, outcome["apart"]
    first: dict[str, Any] = outcomes[0]
    return first


@pytest.mark.parametrize("exchange", SPLIT, ids=lambda e: e.name)
@pytest.mark.parametrize("name", KINDS)
def test_outputs_and_gradients_are_the_unsharded_ones(
    gloo_pool: GlooPool, name: str, exchange: LinearCollectives
) -> None:
    outcome = run(gloo_pool, 2, name, exchange)
    assert {*outcome["apart"]} == {"y", "dx", "dw"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("exchange", SPLIT, ids=lambda e: e.name)
@pytest.mark.parametrize("name", ["ring", "sliced 2"])
def test_four_ranks_and_rows_that_do_not_divide(
    gloo_pool: GlooPool, name: str, exchange: LinearCollectives
) -> None:
    run(gloo_pool, 4, name, exchange)
    if exchange in (
        LinearCollectives.COLUMN,
        LinearCollectives.ROW,
    ):  # [3, 2] rows are not a multiple of four
        run(gloo_pool, 4, name, exchange, length=3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("exchange", SPLIT, ids=lambda e: e.name)
@pytest.mark.parametrize("name", ["plain", "ring", "sliced 2"])
def test_a_frozen_weight_has_no_gradient_and_its_input_is_not_kept(
    gloo_pool: GlooPool, name: str, exchange: LinearCollectives
) -> None:
    outcome = run(gloo_pool, 2, name, exchange, frozen=True)
    assert outcome["kept"] == [jobs.N * jobs.K // 2]
    trained = run(gloo_pool, 2, name, exchange)
    assert len(trained["kept"]) == 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("exchange", SPLIT, ids=lambda e: e.name)
@pytest.mark.parametrize("name", ["plain", "ring", "sliced 2"])
def test_a_gradient_that_is_added_to_its_buffer_is_the_same(
    gloo_pool: GlooPool, name: str, exchange: LinearCollectives
) -> None:
    run(gloo_pool, 2, name, exchange, accumulate=True)


WHOLE_X = jobs.S * jobs.B * jobs.K * 8
WHOLE_Y = jobs.S * jobs.B * jobs.N * 8
GATHER, SCATTER, REDUCE = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"


@pytest.mark.parametrize(
    ("name", "exchange", "forward", "backward"),
    [
        (
            "sliced 2",
            LinearCollectives.COLUMN_SEQUENCE,
            ({GATHER: 2}, {GATHER: WHOLE_X // 2}),
            ({GATHER: 1, SCATTER: 1}, {GATHER: WHOLE_X // 2, SCATTER: WHOLE_X}),
        ),
        (
            "sliced 2",
            LinearCollectives.ROW_SEQUENCE,
            ({SCATTER: 2}, {SCATTER: WHOLE_Y}),
            ({GATHER: 2}, {GATHER: WHOLE_Y // 2}),
        ),
        ("sliced 8", LinearCollectives.ROW, ({REDUCE: 8}, {REDUCE: WHOLE_Y}), ({}, {})),
        ("sliced 8", LinearCollectives.COLUMN, ({}, {}), ({REDUCE: 1}, {REDUCE: WHOLE_X})),
        (
            "ring",
            LinearCollectives.COLUMN_SEQUENCE,
            ({"send": 1, "recv_": 1}, None),
            ({GATHER: 1, SCATTER: 1}, {GATHER: WHOLE_X // 2, SCATTER: WHOLE_X}),
        ),
        (
            "ring",
            LinearCollectives.ROW_SEQUENCE,
            ({"send": 1, "recv_": 1}, None),
            ({"send": 1, "recv_": 1}, None),
        ),
    ],
    ids=str,
)
def test_communication_volume_is_that_of_the_collectives(
    gloo_pool: GlooPool, name: str, exchange: LinearCollectives, forward: Any, backward: Any
) -> None:
    outcome = run(gloo_pool, 2, name, exchange)
    for direction, (calls, nbytes) in (("forward", forward), ("backward", backward)):
        assert outcome[direction][0] == calls
        if nbytes is not None:
            assert outcome[direction][1] == nbytes


def test_saved_gathered_inputs_are_not_gathered_again(gloo_pool: GlooPool) -> None:
    outcome = run(gloo_pool, 2, "sliced 2", LinearCollectives.COLUMN_SEQUENCE, keep=True)
    assert outcome["backward"][0] == {SCATTER: 1}
    assert max(outcome["kept"]) == jobs.S * jobs.B * jobs.K


def test_the_next_slice_is_under_way_while_one_is_multiplied(gloo_pool: GlooPool) -> None:
    for events in gloo_pool.run(jobs.overlap, 2, "sliced 4"):
        assert events == ["start", "start", "wait", "start", "wait", "start", "wait", "wait"]


@pytest.mark.parametrize(("rows", "number"), [(8, 4), (7, 4), (3, 8), (1, 2), (5, 1)])
def test_slices_are_nearly_equal_and_none_is_empty(rows: int, number: int) -> None:
    parts = list(sliced_matmul.slices(rows, number))
    assert [i for part in parts for i in range(part.start, part.stop)] == [*range(rows)]
    sizes = [part.stop - part.start for part in parts]
    assert len(parts) == min(rows, number)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_product_is_added_in_the_dtype_of_the_sum(dtype: torch.dtype) -> None:
    """There is no intermediate rounding: a product of half-precision numbers is exact."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, n, generator=generator).to(dtype) for n in (5, 3))
    wide = torch.promote_types(dtype, torch.float32)
    total = torch.ones(5, 3, dtype=wide)
    matmul_add_fp32(total, a, b)
    exact = 1 + a.double().t() @ b.double()
    assert (total - exact).abs().max() <= 64 * torch.finfo(wide).eps * exact.abs().max()


@pytest.mark.parametrize(
    ("block", "sizes"), [(2**20, [5]), (2 * 3 * 2, [2, 2, 1]), (1, [1] * 5)], ids=str
)
def test_a_wider_sum_takes_products_of_a_few_rows(
    monkeypatch: pytest.MonkeyPatch, block: int, sizes: list[int]
) -> None:
    """At least one; two rows of three bf16 numbers take 12 bytes. Whole numbers are exact."""
    monkeypatch.setattr(gradients, "PRODUCT_BYTES", block)
    seen: list[int] = []

    def matmul(input: Tensor, mat2: Tensor, *, out: Tensor | None = None) -> Tensor:
        seen.append(len(input))
        return torch.mm(input, mat2, out=out)

    generator = torch.Generator().manual_seed(0)
    total, want = None, torch.zeros(5, 3).double()
    for _ in range(2):
        a, b = (torch.randint(-4, 5, (7, n), generator=generator).bfloat16() for n in (5, 3))
        total = plus_product(total, a, b, torch.float32, matmul)
        want += a.double().t() @ b.double()
    assert total is not None
    assert total.dtype is torch.float32
    assert torch.equal(total.double(), want)
    assert seen == 2 * sizes


def test_a_tied_weight_gets_zeros_beside_what_was_added() -> None:
    weight = nn.Parameter(torch.ones(2, 3))
    weight.main_grad = torch.zeros(2, 3)  # type: ignore[attr-defined]
    weight.zero_out_wgrad = True  # type: ignore[attr-defined]
    left = weight_gradient(weight, torch.ones(4, 2), torch.ones(4, 3), matmul_add_fp32)
    assert torch.equal(left, torch.zeros(2, 3))
    assert torch.equal(weight.main_grad, torch.full((2, 3), 4.0))  # type: ignore[attr-defined]


def test_another_forward_is_not_lost_in_silence() -> None:
    link = linear_link(nn.Linear(2, 2), keep_gathered=True)
    with pytest.raises(ValueError, match=r"already replaced .* by .*; enable only one"):
        link.wrap(lambda x: x)
