"""Sinkhorn's bias against the definition of what it solves, and over two ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ascend_run.ops.experts.sinkhorn import sinkhorn_bias
from ascend_run.testing.effects import CollectiveCall, count_collectives
from ascend_run.testing.pool import GlooPool

TOLERANCE = 1e-13


def logits(case: str) -> Tensor:
    drawn = torch.randn(60, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    if case == "all tokens on one expert":
        drawn[:, 2] += 30.0
    if case == "equal scores":
        drawn.zero_()
    if case == "an expert out of reach":
        drawn[:, 2] = -1e30
    if case == "not numbers":
        drawn[3, 3] = torch.nan
    if case == "large":
        drawn = 8 * drawn + 200.0
    return drawn


def bias_of_a_share(case: str) -> Tensor:
    """A job for the pool."""
    rank, size = dist.get_rank(), dist.get_world_size()
    assert dist.group.WORLD is not None
    return sinkhorn_bias(logits(case).chunk(size)[rank], dist.group.WORLD, TOLERANCE)


@pytest.mark.parametrize("case", ["plain", "all tokens on one expert", "equal scores", "large"])
def test_every_expert_gets_the_same_share_whatever_the_ranks(
    gloo_pool: GlooPool, case: str
) -> None:
    (alone,) = gloo_pool.run(bias_of_a_share, 1, case)
    shares = (logits(case) + alone).softmax(dim=-1).mean(dim=0)
    torch.testing.assert_close(shares, torch.full_like(shares, 1 / 7), rtol=1e-9, atol=0.0)
    for bias in gloo_pool.run(bias_of_a_share, 2, case):
        torch.testing.assert_close(bias, alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", ["an expert out of reach", "not numbers"])
def test_logits_that_no_bias_balances_end(gloo_pool: GlooPool, case: str) -> None:
    (bias,) = gloo_pool.run(bias_of_a_share, 1, case)
    assert bias.shape == (7,)
    assert bool(bias.isfinite().all()) is (case != "not numbers")


def collectives_of_a_share(case: str, dtype: torch.dtype) -> Sequence[CollectiveCall]:
    """A job for the pool: what a rank sends at the default tolerance."""
    rank, size = dist.get_rank(), dist.get_world_size()
    assert dist.group.WORLD is not None
    with count_collectives() as seen:
        sinkhorn_bias(logits(case).to(dtype).chunk(size)[rank], dist.group.WORLD)
    return seen.collective_calls


def rounds(scores_TX: Tensor, tolerance: float) -> int:
    """Scale the rows and columns of all tokens' scores in turn, until the columns stay."""
    columns_X, count, change = torch.ones_like(scores_TX[0]), 0, torch.inf
    while change > tolerance:
        rows_T1 = 1 / (scores_TX * columns_X).sum(dim=1, keepdim=True)
        scaled_X = 1 / (scores_TX * rows_T1).mean(dim=0) / scores_TX.shape[1]
        change = float((scaled_X / columns_X).log().abs().mean())
        columns_X, count = scaled_X, count + 1
    return count


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", ["plain", "all tokens on one expert"])
def test_each_round_is_one_reduction_of_a_number_for_each_expert(
    gloo_pool: GlooPool, case: str, dtype: torch.dtype
) -> None:
    one = CollectiveCall("allreduce_", (0, 1), nbytes=7 * dtype.itemsize)
    expected = rounds(logits(case).exp(), 1e-4)
    assert expected > 2
    for seen in gloo_pool.run(collectives_of_a_share, 2, case, dtype):
        assert seen == [one] * expected


def test_a_logit_that_is_not_a_number_ends_the_rounds_on_every_rank(gloo_pool: GlooPool) -> None:
    assert not logits("not numbers")[30:].isnan().any(), "only the first rank has it"
    for seen in gloo_pool.run(collectives_of_a_share, 2, "not numbers", torch.float32):
        assert len(seen) == 1
