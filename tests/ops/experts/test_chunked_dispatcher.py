"""The chunked dispatcher on ranks: results, order of events, and communication volume."""

from __future__ import annotations

import pytest

from ascend_run.ops.experts.dispatcher_cost import chunk_sizes
from ascend_run.testing.pool import GlooPool

from . import dispatcher_jobs as jobs

ITEM, INDEX = 8, 8
"""Bytes of float64 and of int64."""


@pytest.mark.exhaustive(
    by=lambda ep, tp, experts, chunks, fused: enumerate([ep, tp, experts, chunks, fused])
)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("ep", "tp", "experts", "chunks"),
    [(2, 1, 4, 2), (2, 1, 6, 2), (2, 1, 6, 3), (4, 1, 8, 2), (2, 2, 6, 2)],
)
def test_output_and_every_gradient_are_those_of_each_token(
    gloo_pool: GlooPool, ep: int, tp: int, experts: int, chunks: int, fused: bool
) -> None:
    """Of inputs, probabilities, experts and shared experts; chunks and ranks without tokens, and
    chunks of different sizes, included."""
    for found in gloo_pool.run(jobs.errors_in_chunks, ep * tp, ep, tp, experts, chunks, fused):
        for errors in found:
            assert max(errors.values()) <= 1e-10, errors


PLAIN = [
    *("issue", "issue", "issue", "issue"),  # tokens and probabilities of both chunks
    *("wait", "wait", "experts", "issue", "wait", "wait", "experts", "issue", "wait", "wait"),
    *("issue", "issue", "wait", "dexperts", "issue", "issue"),
    *("wait", "dexperts", "issue", "issue", "wait", "wait", "wait", "wait"),
]
SHARED = [
    *("issue", "issue", "issue", "issue", "fc1"),
    *("wait", "wait", "experts", "issue", "wait", "wait", "experts", "issue", "fc2"),
    *("wait", "wait", "issue", "issue", "dfc2", "wait", "dexperts", "issue", "issue"),
    *("wait", "dexperts", "issue", "issue", "dfc1", "wait", "wait", "wait", "wait"),
]


@pytest.mark.parametrize(("shared", "expected"), [(False, PLAIN), (True, SHARED)], ids=str)
def test_a_chunk_is_computed_while_others_are_exchanged(
    gloo_pool: GlooPool, shared: bool, expected: list[str]
) -> None:
    """Forward and backward: between its wait and its issue, the others have no wait."""
    for _, log, *_ in gloo_pool.run(jobs.dispatch_in_chunks, 2, 2, 1, "spread", 2, shared):
        assert log == expected


@pytest.mark.parametrize(("ep", "tp"), [(2, 1), (2, 2)])
@pytest.mark.parametrize("kind", ["spread", "first"])
def test_communication_volume_is_that_of_one_exchange(
    gloo_pool: GlooPool, kind: str, ep: int, tp: int
) -> None:
    for _, _, seen, (sent, received, _) in gloo_pool.run(
        jobs.dispatch_in_chunks, ep * tp, ep, tp, kind, 2, False
    ):
        row, out = (jobs.H + 1) * ITEM, jobs.H * ITEM
        forward, backward = sent * row + received * out, received * row + sent * out
        assert seen.sent_bytes["alltoall_base_"] == forward + backward
        assert seen.sent_bytes["_allgather_base_"] == jobs.X * INDEX
        assert sum(seen.calls.values()) == 1 + 2 * 6 + 2 * 6 * (tp > 1)


@pytest.mark.parametrize("number", [1, 2, 3, 5, 7])
def test_chunks_have_all_experts_and_differ_by_at_most_one(number: int) -> None:
    sizes = chunk_sizes(7, number)
    assert (len(sizes), sum(sizes)) == (number, 7)
    assert max(sizes) - min(sizes) <= 1
