"""Expert matmuls with their collectives, against the unsharded computation."""

from __future__ import annotations

import pytest

from ascend_run.testing.pool import GlooPool

from . import expert_collectives_jobs as jobs


@pytest.mark.exhaustive(by=lambda shard_type, ep, tp: [shard_type, (ep, tp)])
@pytest.mark.parametrize("shard_type", [0, 1], ids=["hidden", "tokens"])
@pytest.mark.parametrize(("ep", "tp"), [(2, 1), (1, 2), (2, 2)], ids=str)
def test_both_products_and_every_gradient_are_the_unsharded_ones(
    gloo_pool: GlooPool, ep: int, tp: int, shard_type: int
) -> None:
    for differences in gloo_pool.run(jobs.feed_forward, ep * tp, ep, tp, shard_type):
        assert {name: d for name, d in differences.items() if d > 1e-12} == {}


def test_only_requested_results_are_returned(gloo_pool: GlooPool) -> None:
    assert all(gloo_pool.run(jobs.nothing_more_is_answered, 2))
