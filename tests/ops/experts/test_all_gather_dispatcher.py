"""The all-gather dispatcher on ranks: results, order of events, and communication volume."""

from __future__ import annotations

import pytest
import torch

from ascend_run.testing.pool import GlooPool

from . import dispatcher_jobs as jobs

TOPK, ITEM, INDEX = 2, 8, 4
"""Experts of a token; bytes of float64 and of int32."""


@pytest.mark.parametrize(("ep", "tp"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)])
def test_output_and_every_gradient_are_those_of_each_token(
    gloo_pool: GlooPool, ep: int, tp: int
) -> None:
    """Of inputs, probabilities and experts; ranks without tokens included."""
    for found in gloo_pool.run(jobs.errors_of_all_gather, ep * tp, ep, tp):
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


def test_tokens_are_gathered_at_once_and_waited_for_after_sorting(
    gloo_pool: GlooPool,
) -> None:
    for _, log, *_ in gloo_pool.run(jobs.dispatch_gathered, 2, 2, 1, "spread"):
        assert log == [
            *("issue", "issue", "wait", "wait", "experts", "issue", "wait"),
            *("issue", "wait", "dexperts", "issue", "issue", "wait", "wait"),
        ]


@pytest.mark.exhaustive(by=lambda kind, ep, tp: [kind, (ep, tp)])
@pytest.mark.parametrize(("ep", "tp"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("kind", ["spread", "first"])
def test_communication_volume_equals_its_formula(
    gloo_pool: GlooPool, kind: str, ep: int, tp: int
) -> None:
    """It does not depend on the routing."""
    choices = jobs.TOKENS * TOPK
    tokens, weights = jobs.TOKENS * jobs.H * ITEM, choices * ITEM
    for _, _, seen in gloo_pool.run(jobs.dispatch_gathered, ep * tp, ep, tp, kind):
        assert seen.sent_bytes["_allgather_base_"] == choices * INDEX + weights + 2 * tokens
        assert seen.sent_bytes["_reduce_scatter_base_"] == ep * tp * (2 * tokens + weights)
        assert sum(seen.calls.values()) == 7
