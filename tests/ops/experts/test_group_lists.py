"""Grouped GEMMs by group lists, against one matmul per group under autograd."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from ascend_run.ops.experts.group_lists import (
    group_sizes,
    grouped_matmul_add_,
    listed_grouped_matmul,
    listed_grouped_outer,
)
from tests.ops.elementwise import elementwise as check

SIZES = [(3, 0, 4, 2), (0, 0, 5, 0), (0, 0, 0, 0)]


def listed(sizes: tuple[int, ...], cumulative: bool, kind: type) -> Tensor | list[int]:
    entries = list(accumulate(sizes)) if cumulative else list(sizes)
    return torch.tensor(entries) if kind is Tensor else entries


@pytest.mark.parametrize("kind", [Tensor, list], ids=["tensor", "list"])
@pytest.mark.parametrize("cumulative", [True, False], ids=["totals", "counts"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products_and_gradients_follow_each_group(
    sizes: tuple[int, ...], cumulative: bool, kind: type
) -> None:
    owner = [group for group, size in enumerate(sizes) for _ in range(size)]
    groups = listed(sizes, cumulative, kind)

    def ours(x: Tensor, matrices: Tensor, bias: Tensor) -> Tensor:
        return listed_grouped_matmul(x, matrices, groups, cumulative=cumulative, bias_XN=bias)

    def formula(x: Tensor, matrices: Tensor, bias: Tensor) -> Tensor:
        return torch.einsum("tk,tkn->tn", x, matrices[owner]) + bias[owner]

    leaves = [check.draw(sum(sizes), 5, seed=0), check.draw(4, 5, 6, seed=1)]
    check.assert_equal_to_formula(ours, formula, [*leaves, check.draw(4, 6, seed=2)])

    def ours_transposed(x: Tensor, matrices: Tensor) -> Tensor:
        return listed_grouped_matmul(x, matrices.mT, groups, cumulative=cumulative)

    def formula_transposed(x: Tensor, matrices: Tensor) -> Tensor:
        return torch.einsum("tk,tnk->tn", x, matrices[owner])

    leaves[1] = check.draw(4, 6, 5, seed=1)
    check.assert_equal_to_formula(ours_transposed, formula_transposed, leaves)


@pytest.mark.parametrize("cumulative", [True, False], ids=["totals", "counts"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products_over_rows_follow_each_group(sizes: tuple[int, ...], cumulative: bool) -> None:
    members = torch.zeros(len(sizes), sum(sizes), dtype=torch.float64)
    for row, group in enumerate([g for g, size in enumerate(sizes) for _ in range(size)]):
        members[group, row] = 1
    groups = listed(sizes, cumulative, list)

    def formula(a: Tensor, b: Tensor) -> Tensor:
        return torch.einsum("xt,tn,tk->xnk", members, a, b)

    leaves = [check.draw(sum(sizes), 5, seed=0), check.draw(sum(sizes), 6, seed=1)]
    check.assert_equal_to_formula(
        lambda a, b: listed_grouped_outer(a, b, groups, cumulative=cumulative), formula, leaves
    )
    start = check.draw(len(sizes), 5, 6, seed=2).detach()
    total = start.clone()
    assert grouped_matmul_add_(total, *leaves, groups, cumulative=cumulative) is total
    torch.testing.assert_close(total, start + formula(*leaves).detach(), rtol=0, atol=1e-12)


def test_nothing_is_rounded_on_its_way_into_a_wider_sum() -> None:
    a, b = (check.draw(64, 4, seed=seed, dtype=torch.bfloat16).detach() for seed in (0, 1))
    total = torch.zeros(1, 4, 4)
    grouped_matmul_add_(total, a, b, [64], cumulative=True)
    exact = a.double().t() @ b.double()
    assert (total[0] - exact).abs().max() < 1e-5
    assert ((a.t() @ b).double() - exact).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("entries", "cumulative", "message"),
    [
        ([3, 2], True, r"\[3, 2\] \(cumulative sums\): .* nondecreasing and end with 5"),
        ([3, 4], True, "end with 5"),
        ([6, -1], False, r"\(rows of each group\): .* nonnegative and sum to 5"),
        ([3, 4], False, "sum to 5"),
    ],
    ids=str,
)
def test_a_list_that_does_not_fit_is_refused(
    entries: list[int], cumulative: bool, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        group_sizes(entries, cumulative, 5)
