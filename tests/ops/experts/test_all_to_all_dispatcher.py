"""The all-to-all dispatcher on ranks: results, order of events, and communication volume."""

from __future__ import annotations

import pytest

from ascend_run.testing.pool import GlooPool

from . import dispatcher_jobs as jobs

TOPK, ITEM, INDEX = 2, 8, 8
"""Experts of a token; bytes of float64 and of int64."""


@pytest.mark.exhaustive(by=lambda ep, tp, overlap: [ep, (overlap, tp)])
@pytest.mark.parametrize(("overlap", "fused"), [(False, False), (True, True)], ids=str)
@pytest.mark.parametrize(("ep", "tp"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)])
def test_output_and_every_gradient_are_those_of_each_token(
    gloo_pool: GlooPool, ep: int, tp: int, overlap: bool, fused: bool
) -> None:
    """Of inputs, probabilities, experts and shared experts; ranks without tokens included."""
    for found in gloo_pool.run(jobs.errors_of_all_to_all, ep * tp, ep, tp, overlap, fused):
        for errors in found:
            assert max(errors.values()) <= 1e-10, errors


COUNTS = ["gather", "comm", "arrange", "permute", "gathered"]
"""Shared experts' own gather and the permutation are behind the gather of counts."""
OVERLAPPED = [
    *(*COUNTS, "issue", "issue", "fc1", "order", "wait", "wait", "experts"),
    *("order", "issue", "fc2", "wait"),
    *("issue", "dfc2", "wait", "dexperts", "issue", "issue", "dfc1", "wait", "wait"),
]
WAITED = [
    *(*COUNTS, "issue", "wait", "issue", "wait", "fc1", "order", "experts"),
    *("order", "issue", "wait", "fc2"),
    *("dfc2", "issue", "wait", "dexperts", "dfc1", "issue", "wait", "issue", "wait"),
]


@pytest.mark.parametrize(
    ("overlap", "expected"), [(True, OVERLAPPED), (False, WAITED)], ids=["overlaps", "waits"]
)
def test_shared_experts_are_computed_between_issue_and_wait(
    gloo_pool: GlooPool, overlap: bool, expected: list[str]
) -> None:
    for _, log, *_ in gloo_pool.run(jobs.dispatch, 2, 2, 1, "spread", overlap, True):
        assert log == expected


@pytest.mark.exhaustive(by=lambda kind, ep, tp: [kind, (ep, tp)])
@pytest.mark.parametrize(("ep", "tp"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("kind", ["spread", "first"])
def test_communication_volume_equals_its_formula(
    gloo_pool: GlooPool, kind: str, ep: int, tp: int
) -> None:
    """A row is its hidden state and its probability; outputs have no probability. On gloo ranks of
    the same experts pad to the one with most rows."""
    run = gloo_pool.run(jobs.dispatch, ep * tp, ep, tp, kind, True, False)
    for rank, (_, _, seen) in enumerate(run):
        sent, received, most = jobs.exchanged_rows(ep, tp, rank, kind, TOPK)
        row, out = (jobs.H + 1) * ITEM, jobs.H * ITEM
        expected = {"_allgather_base_": jobs.X * INDEX}
        if ep > 1:
            forward, backward = sent * row + received * out, received * row + sent * out
            expected["alltoall_base_"] = forward + backward
        if tp > 1:
            expected["allgather_"] = most * (row + out)
            expected["reduce_scatter_"] = tp * most * (out + row)
        assert {name: seen.sent_bytes[name] for name in expected} == expected
        assert sum(seen.calls.values()) == 1 + 6 * (ep > 1) + 6 * (tp > 1)


@pytest.mark.parametrize(("ep", "tp"), [(1, 1), (2, 1), (1, 2)])
def test_the_device_is_read_once_and_not_at_all_with_padding(
    gloo_pool: GlooPool, ep: int, tp: int
) -> None:
    """From the routing to the sums of outputs; with tokens dropped, too."""
    cases = [(None, False), (0.6, False), (0.6, True)]
    for found in gloo_pool.run(jobs.reads, ep * tp, ep, tp, cases):
        assert [len(seen) for seen in found] == [1, 1, 0], found
