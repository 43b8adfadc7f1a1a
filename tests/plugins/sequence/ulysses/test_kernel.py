"""All-to-all over heads on 1, 2 and 4 ranks against attention on the full sequence, in float64.

The tests apply to any plugin of this kind; see ``conftest.exchange``.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ascend_run.plugin_api import contracts as c
from ascend_run.testing.pool import GlooPool

from . import kernel_jobs as jobs
from .kernel_jobs import Case

TOLERANCE = 1e-10

CASES = {
    "multi-head": Case(),
    "grouped": Case(groups=4),
    "fewer-groups-than-ranks": Case(groups=2),
    "multi-query": Case(groups=1),
    "groups-and-ranks-share-a-factor": Case(heads=24, groups=6),
    "odd-batch": Case(batch=3, groups=4),
    "packed": Case(batch=None, groups=2),
    "unequal-widths": Case(width=6, value_width=3, groups=4),
    "unequal-lengths": Case(key_length=24, groups=4),
    "sinks": Case(sinks=True, groups=2),
    "inner-reads-everything": Case(groups=2, reads=frozenset({"q", "k", "v", "out", "lse"})),
    "inner-reads-nothing": Case(groups=2, reads=frozenset()),
}


def reference(case: Case) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return output, log-sum-exp and gradients on the full sequence."""
    *inputs, dout = case.tensors()
    leaves = [x.requires_grad_() for x in inputs]
    spec = case.spec
    if spec.sinks is not None:
        leaves.append(spec.sinks.requires_grad_())
    out, lse = jobs.plain_attention(*leaves[:3], spec)
    return out.detach(), lse.detach(), list(torch.autograd.grad(out, leaves, dout))


def error(result: Tensor, expected: Tensor) -> float:
    assert result.shape == expected.shape
    return ((result - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.exhaustive(by=lambda world_size: [world_size])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_output_log_sum_exp_and_gradients_match_the_full_sequence(
    gloo_pool: GlooPool, exchange: str, name: str, world_size: int
) -> None:
    case = CASES[name]
    outcomes = gloo_pool.run(jobs.attend, world_size, exchange, case)
    out, lse, (dq, dk, dv, *dsinks) = reference(case)
    assert error(torch.cat([o.out for o in outcomes]), out) <= TOLERANCE
    assert error(torch.cat([o.lse for o in outcomes], dim=-1), lse) <= TOLERANCE
    for i, expected in enumerate((dq, dk, dv)):
        assert error(torch.cat([o.gradients[i] for o in outcomes]), expected) <= TOLERANCE
    for expected in dsinks:  # each rank holds its heads' contribution; training sums over ranks
        total = torch.stack([o.gradients[3] for o in outcomes]).sum(0)
        assert error(total, expected) <= TOLERANCE


def test_the_inner_mask_is_of_the_full_sequence(gloo_pool: GlooPool, exchange: str) -> None:
    for outcome in gloo_pool.run(jobs.attend, 2, exchange, Case(start=8)):
        assert [spec.mask for spec in outcome.inner_specs] == [c.Mask(causal=True)] * 2


def test_each_rank_has_its_own_dropout_mask_replayed_in_backward(
    gloo_pool: GlooPool, exchange: str
) -> None:
    seeds = gloo_pool.run(jobs.inner_dropout_seeds, 4, exchange)
    assert all(forward == backward for forward, backward in seeds)
    assert len({forward for forward, _ in seeds}) == 4
