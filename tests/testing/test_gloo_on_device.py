"""Ranks that communicate through gloo in a test while their tensors are on an accelerator."""

from __future__ import annotations

import pytest

from ascend_run.testing.pool import GlooPool, PoolError

from .bucket_jobs import passed_on, reduced, scattered, unequal


@pytest.mark.parametrize("async_ops", [False, True])
def test_buckets_of_a_device_are_reduced_one_by_one(gloo_pool: GlooPool, async_ops: bool) -> None:
    for sums, calls in gloo_pool.run(reduced, 2, "cuda", async_ops):
        assert sums == [3.0, 21.0]
        assert calls == {"allreduce_": 2}


def test_a_share_of_a_bucket_is_there_after_the_wait(gloo_pool: GlooPool) -> None:
    """Gloo writes it in the wait for the reduce-scatter itself."""
    first, second = gloo_pool.run(scattered, 2, "cuda")
    assert first == ([0.0, 0.0], [1.0, 3.0])
    assert second == ([0.0, 0.0], [5.0, 7.0])


def test_on_the_cpu_they_stay_coalesced(gloo_pool: GlooPool) -> None:
    for sums, calls in gloo_pool.run(reduced, 2, "cpu", False):
        assert sums == [3.0, 21.0]
        assert calls == {"allreduce_coalesced_": 1}


@pytest.mark.parametrize("batched", [False, True])
def test_what_is_received_on_a_device_is_copied_to_it_by_the_wait(
    gloo_pool: GlooPool, batched: bool
) -> None:
    """Gloo would write to the tensor's own memory before."""
    for rank, found in enumerate(gloo_pool.run(passed_on, 2, True, batched)):
        assert found["replaced"]
        assert found["restored"]
        assert found["before the wait"] == 0.0
        assert found["received"] == [2.0 - rank]
        assert found["calls"] == {"send": 1, "recv_": 1}


@pytest.mark.parametrize("batched", [False, True])
def test_tensors_of_the_host_are_sent_and_received_as_they_are(
    gloo_pool: GlooPool, batched: bool
) -> None:
    for rank, found in enumerate(gloo_pool.run(passed_on, 2, False, batched)):
        assert found["received"] == [2.0 - rank]
        assert found["calls"] == {"send": 1, "recv_": 1}


def test_unequal_parts_of_a_device_are_padded(gloo_pool: GlooPool) -> None:
    for rank, (gathered, summed) in enumerate(gloo_pool.run(unequal, 3, True)):
        assert gathered == [[1.0], [2.0, 2.0], [3.0, 3.0, 3.0]]
        assert summed == [3.0 + 30.0 * rank] * (rank + 1)


def test_gloo_refuses_unequal_parts_itself(gloo_pool: GlooPool) -> None:
    with pytest.raises(PoolError, match="invalid tensor size"):
        gloo_pool.run(unequal, 3, False)
