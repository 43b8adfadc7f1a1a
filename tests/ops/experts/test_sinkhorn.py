"""Sinkhorn's bias against the definition of what it solves, and over two ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ascend_run.ops.experts.sinkhorn import sinkhorn_bias
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
