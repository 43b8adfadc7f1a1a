"""Router, dispatcher and experts: results, with dropped tokens too, and padded shapes."""

from __future__ import annotations

import pytest

from ascend_run.testing.pool import GlooPool

from . import routed_layer_jobs as jobs

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]


@pytest.mark.exhaustive(by=lambda ep, tp, name: [name] if (ep, tp) == (2, 1) else [])
@pytest.mark.parametrize("name", jobs.DISPATCHERS)
@pytest.mark.parametrize(("ep", "tp"), LAYOUTS)
def test_output_and_every_gradient_are_those_of_each_token(
    gloo_pool: GlooPool, ep: int, tp: int, name: str
) -> None:
    """Of inputs, router, experts and shared experts; with all tokens on one expert, equal scores,
    experts without tokens, ranks without tokens, and no tokens at all."""
    for found in gloo_pool.run(jobs.errors, ep * tp, ep, tp, name, False, timeout=240):
        for case, (errors, _) in found:
            assert max(errors.values()) <= 1e-10, (case, errors)


@pytest.mark.exhaustive(by=lambda ep, tp, name: ["one"] if ep == tp == 2 else [])
@pytest.mark.parametrize("name", jobs.DISPATCHERS)
@pytest.mark.parametrize(("ep", "tp"), LAYOUTS)
def test_output_and_every_gradient_are_those_of_tokens_not_dropped(
    gloo_pool: GlooPool, ep: int, tp: int, name: str
) -> None:
    """Of inputs, router, experts and shared experts; both policies, padded and not, with all
    tokens on one expert, equal scores, and experts without tokens."""
    assert_errors_of_dropping_layers(gloo_pool, ep, tp, name)


@pytest.mark.parametrize(("ep", "tp"), LAYOUTS)
def test_experts_that_exchange_their_tokens_are_those_of_each_token(
    gloo_pool: GlooPool, ep: int, tp: int
) -> None:
    assert_errors_of_dropping_layers(gloo_pool, ep, tp, jobs.EXCHANGING)


@pytest.mark.exhaustive(by=lambda tp, name: [name] if tp == 2 else [])
@pytest.mark.parametrize("name", [jobs.CHUNKED, jobs.CHUNKED_GATHER])
@pytest.mark.parametrize(("ep", "tp"), [(2, 1), (2, 2)])
def test_experts_in_chunks_are_those_of_each_token(
    gloo_pool: GlooPool, ep: int, tp: int, name: str
) -> None:
    """Dropped, padded and not; ranks without tokens and no tokens at all."""
    assert_errors_of_dropping_layers(gloo_pool, ep, tp, name)
    for found in gloo_pool.run(jobs.errors, ep * tp, ep, tp, name, False, timeout=240):
        for case, (errors, _) in found:
            assert max(errors.values()) <= 1e-10, (case, errors)


@pytest.mark.exhaustive(by=lambda ep: [ep] if ep == 2 else [])
@pytest.mark.parametrize("ep", [2, 4])
def test_replicated_experts_are_those_of_each_token(gloo_pool: GlooPool, ep: int) -> None:
    """Of inputs, router, experts and shared experts; dropped and not, with all tokens on one
    expert, equal scores, ranks without tokens and no tokens at all."""
    assert_errors_of_dropping_layers(gloo_pool, ep, 1, jobs.HOT)
    for found in gloo_pool.run(jobs.errors, ep, ep, 1, jobs.HOT, False, timeout=240):
        for case, (errors, _) in found:
            assert max(errors.values()) <= 1e-10, (case, errors)


def assert_errors_of_dropping_layers(pool: GlooPool, ep: int, tp: int, name: str) -> None:
    dropped = 0
    for found in pool.run(jobs.errors, ep * tp, ep, tp, name, True, timeout=240):
        for case, (errors, lost) in found:
            assert max(errors.values()) <= 1e-10, (case, errors)
            dropped += lost
            assert lost > 0 or case.factor > 1 or case.kind in ("spread", "no tokens"), case
    assert dropped > 0


@pytest.mark.parametrize(
    ("name", "chunks"),
    [("moe-alltoall", 1), ("moe-permute-fusion", 1), (jobs.CHUNKED, 2)],
)
def test_padded_layers_exchange_no_counts(gloo_pool: GlooPool, name: str, chunks: int) -> None:
    """Tokens and weights there, outputs back; in backward, the same the other way."""
    for log, gathered in gloo_pool.run(jobs.events, 2, 2, 1, name):
        assert log.count("issue") == log.count("wait") == 6 * chunks
        assert gathered == 0
