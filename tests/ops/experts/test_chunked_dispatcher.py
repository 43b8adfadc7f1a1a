"""The chunked dispatcher on ranks: results, order of events, and communication volume."""

from __future__ import annotations

import pytest

from ascend_run.ops.experts.chunk_limits import chunk_sizes
from ascend_run.testing.pool import GlooPool

from . import dispatcher_jobs as jobs

TOPK, ITEM, INDEX = 2, 8, 8
"""Experts of a token; bytes of float64 and of int64."""


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
    *("gather", "arrange", "permute", "gathered"),  # behind the gather of counts
    *("issue", "issue", "issue", "issue"),  # tokens and probabilities of both chunks
    *("wait", "wait", "experts", "issue", "wait", "wait", "experts", "issue", "wait", "wait"),
    *("issue", "issue", "wait", "dexperts", "issue", "issue"),
    *("wait", "dexperts", "issue", "issue", "wait", "wait", "wait", "wait"),
]
SHARED = [
    *("gather", "comm", "arrange", "permute", "gathered"),
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
    """Each chunk, of one of the two experts of a rank, is gathered by the ranks of the same
    experts: on gloo all of them send as many rows as the one with most."""
    run = gloo_pool.run(jobs.dispatch_in_chunks, ep * tp, ep, tp, kind, 2, False)
    for rank, (_, _, seen) in enumerate(run):
        sent, received, _ = jobs.exchanged_rows(ep, tp, rank, kind, TOPK)
        chunks = [slice(0, 1), slice(1, 2)]
        most = sum(jobs.exchanged_rows(ep, tp, rank, kind, TOPK, chunk)[2] for chunk in chunks)
        row, out = (jobs.H + 1) * ITEM, jobs.H * ITEM
        forward, backward = sent * row + received * out, received * row + sent * out
        expected = {"alltoall_base_": forward + backward, "_allgather_base_": jobs.X * INDEX}
        if tp > 1:
            expected["allgather_"] = most * (row + out)
            expected["reduce_scatter_"] = tp * most * (out + row)
        assert dict(seen.sent_bytes) == expected
        assert sum(seen.calls.values()) == 1 + 2 * 6 + 2 * 6 * (tp > 1)


@pytest.mark.parametrize("number", [1, 2, 3, 5, 7])
def test_chunks_have_all_experts_and_differ_by_at_most_one(number: int) -> None:
    sizes = chunk_sizes(7, number)
    assert (len(sizes), sum(sizes)) == (number, 7)
    assert max(sizes) - min(sizes) <= 1
