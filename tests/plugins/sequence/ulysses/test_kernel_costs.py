"""Communication and memory of Ulysses' own kernel; not required of other plugins."""

from __future__ import annotations

import pytest

from ascend_run.testing.pool import GlooPool

from . import kernel_jobs as jobs
from .kernel_jobs import Case

ULYSSES = "ulysses"


@pytest.mark.exhaustive(by=lambda case: [case.batch is None])
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(groups=1),
        Case(batch=None, groups=2),
        Case(width=6, value_width=3, groups=4),
    ],
    ids=["multi-head", "multi-query", "packed", "unequal-widths"],
)
def test_forward_and_backward_take_two_collectives_each(gloo_pool: GlooPool, case: Case) -> None:
    for outcome in gloo_pool.run(jobs.attend, 4, ULYSSES, case):
        assert dict(outcome.messages.calls) == {"alltoall_base_": 4}


def test_a_key_value_head_is_repeated_per_rank_not_per_query_head(
    gloo_pool: GlooPool,
) -> None:
    case = Case(heads=8, groups=2, batch=2, length=16, width=4, value_width=4)
    size, item = 4, 8
    rows = case.length // size * 2  # positions times batch on one rank
    forward = rows * item * ((8 + 4 + 4) * 4 + 8 * 4 + 8)  # q, k, v; out and its log-sum-exp
    backward = rows * item * (8 * 4 + (8 + 4 + 4) * 4)  # dout; dq, dk, dv
    for outcome in gloo_pool.run(jobs.attend, size, ULYSSES, case):
        assert outcome.messages.sent_bytes["alltoall_base_"] == forward + backward


def test_only_what_the_inner_kernel_reads_is_saved(gloo_pool: GlooPool) -> None:
    case = Case(heads=8, groups=4, batch=2, length=16)
    exchanged_q_k_v = case.length * 2 * (2 + 1 + 1) * 4 * 8
    for outcome in gloo_pool.run(jobs.attend, 4, ULYSSES, case):
        assert outcome.saved_bytes == exchanged_q_k_v
