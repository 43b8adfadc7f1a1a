"""The all-gather dispatcher on ranks: results, order of events, and communication volume."""

from __future__ import annotations

import pytest
import torch

from ascend_run.testing.pool import GlooPool

from . import dispatcher_jobs as jobs

TOPK, ITEM, INDEX = 2, 8, 4
"""Experts of a token; bytes of float64 and of int32."""


@pytest.mark.exhaustive(by=lambda ep, tp, chunks: [(ep, tp), chunks])
@pytest.mark.parametrize(
    ("ep", "tp", "chunks"),
    [
        *((*sizes, 1) for sizes in ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2))),
        *((2, 1, chunks) for chunks in (2, 3, 7)),
        *((1, 2, chunks) for chunks in (2, 5)),
        *((*sizes, 2) for sizes in ((4, 1), (2, 2))),
    ],
)
def test_output_and_every_gradient_are_those_of_each_token(
    gloo_pool: GlooPool, ep: int, tp: int, chunks: int
) -> None:
    """Of inputs, probabilities, experts and shared experts; with tokens dropped, ranks without
    tokens, chunks of different sizes, and more chunks than tokens."""
    for found in gloo_pool.run(jobs.errors_of_all_gather, ep * tp, ep, tp, chunks):
        for errors in found:
            assert max(errors.values()) <= 1e-10, errors


@pytest.mark.parametrize(("ep", "tp"), [(1, 1), (2, 2)])
def test_tokens_of_an_expert_are_in_the_order_of_the_global_batch(
    gloo_pool: GlooPool, ep: int, tp: int
) -> None:
    ranks, local = range(ep * tp), jobs.X // ep
    tokens = [jobs.draw(jobs.TOKENS, jobs.H, seed=100 + rank) for rank in ranks]
    maps = [jobs.routing("spread", rank, jobs.TOKENS, TOPK) for rank in ranks]
    for rank, rows in enumerate(gloo_pool.run(jobs.gathered_rows, ep * tp, ep, tp, "spread", TOPK)):
        first = rank // tp * local
        expected = [
            tokens[source][token]
            for expert in range(first, first + local)
            for source in ranks
            for token in range(jobs.TOKENS)
            if maps[source][token, expert]
        ]
        assert torch.equal(rows, torch.stack(expected))


GATHERS = ["gather", "issue", "issue"]
"""Of choices, weights and tokens."""
BEHIND = ["gathered", "find", "sort", "place"]
"""What is computed from the choices, while the tokens arrive: this rank's rows."""
WHOLE = [
    *(*GATHERS, *BEHIND, "wait", "wait", "experts", "issue", "wait"),
    *("issue", "wait", "dexperts", "issue", "issue", "wait", "wait"),
]
BESIDE_SHARED = [
    *(*GATHERS, *BEHIND, "wait", "wait", "experts", "issue", "shared", "wait"),
    *("issue", "dshared", "wait", "dexperts", "issue", "issue", "wait", "wait"),
]
CHUNKS = [
    *(*GATHERS, "issue", *BEHIND, "place"),  # the tokens, and their rows, of both chunks
    *("wait", "wait", "experts", "issue", "wait", "experts", "issue", "wait", "wait"),
    *("issue", "issue", "wait", "dexperts", "issue", "wait", "dexperts", "issue"),
    *("issue", "wait", "wait", "wait"),  # of the weights' gradients, and then all
]
CHUNKS_BESIDE_SHARED = [
    *(*GATHERS, "issue", *BEHIND, "place"),
    *("wait", "wait", "experts", "issue", "wait", "experts", "issue", "shared", "wait", "wait"),
    *("issue", "issue", "dshared", "wait", "dexperts", "issue", "wait", "dexperts", "issue"),
    *("issue", "wait", "wait", "wait"),
]


@pytest.mark.parametrize(
    ("chunks", "shared", "expected"),
    [
        (1, False, WHOLE),
        (1, True, BESIDE_SHARED),
        (2, False, CHUNKS),
        (2, True, CHUNKS_BESIDE_SHARED),
    ],
    ids=["whole", "shared", "chunks", "chunks and shared"],
)
def test_experts_are_computed_between_issue_and_wait_of_others(
    gloo_pool: GlooPool, chunks: int, shared: bool, expected: list[str]
) -> None:
    """Forward and backward: between a chunk's wait and its issue the others have no wait, and
    shared experts are behind the exchange of outputs, or of their gradients. Rows are found while
    weights and tokens arrive."""
    for _, log, *_ in gloo_pool.run(jobs.dispatch_gathered, 2, 2, 1, "spread", chunks, shared):
        assert log == expected


@pytest.mark.exhaustive(by=lambda kind, ep, tp, chunks: [kind, (ep, tp, chunks)])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize(("ep", "tp"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("kind", ["spread", "first"])
def test_communication_volume_equals_its_formula(
    gloo_pool: GlooPool, kind: str, ep: int, tp: int, chunks: int
) -> None:
    """It depends neither on the routing nor on the chunks, which are of both exchanges in both
    directions."""
    choices = jobs.TOKENS * TOPK
    tokens, weights = jobs.TOKENS * jobs.H * ITEM, choices * ITEM
    for _, _, seen in gloo_pool.run(jobs.dispatch_gathered, ep * tp, ep, tp, kind, chunks, False):
        assert seen.sent_bytes["_allgather_base_"] == choices * INDEX + weights + 2 * tokens
        assert seen.sent_bytes["_reduce_scatter_base_"] == ep * tp * (2 * tokens + weights)
        assert seen.calls["_allgather_base_"] == 2 + 2 * chunks
        assert seen.calls["_reduce_scatter_base_"] == 1 + 2 * chunks
        assert sum(seen.calls.values()) == 3 + 4 * chunks
