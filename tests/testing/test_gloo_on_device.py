"""Buckets of gradients on an accelerator, whose ranks communicate through gloo in a test."""

from __future__ import annotations

import pytest

from ascend_run.testing.pool import GlooPool

from .bucket_jobs import reduced


@pytest.mark.parametrize("async_ops", [False, True])
def test_buckets_of_a_device_are_reduced_one_by_one(gloo_pool: GlooPool, async_ops: bool) -> None:
    barriers = {"barrier": 1} if async_ops else {}
    for sums, calls in gloo_pool.run(reduced, 2, "cuda", async_ops):
        assert sums == [3.0, 21.0]
        assert calls == {"allreduce_": 2, **barriers}


def test_on_the_cpu_they_stay_coalesced(gloo_pool: GlooPool) -> None:
    for sums, calls in gloo_pool.run(reduced, 2, "cpu", False):
        assert sums == [3.0, 21.0]
        assert calls == {"allreduce_coalesced_": 1}
