"""The pool: jobs on real gloo ranks, and what it does when a rank fails, hangs or dies."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import psutil
import pytest
import torch

from ascend_run.testing import pool as pool_module
from ascend_run.testing.pool import GlooPool, PoolError

from . import pool_jobs


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_meets_the_others_in_a_group_of_the_size_asked(
    gloo_pool: GlooPool, world_size: int
) -> None:
    total = float(sum(range(world_size)))
    expected = [(rank, world_size, total) for rank in range(world_size)]
    assert gloo_pool.run(pool_jobs.sum_of_ranks, world_size) == expected


def test_sizes_share_the_same_processes(gloo_pool: GlooPool) -> None:
    two = gloo_pool.run(pool_jobs.process_id, 2)
    one = gloo_pool.run(pool_jobs.process_id, 1)
    assert len(set(two)) == 2
    assert one == two[:1]


@pytest.mark.parametrize("job", [pool_jobs.process_id, pool_jobs.in_a_new_group])
def test_ranks_that_do_not_communicate_wait_for_each_other(
    gloo_pool: GlooPool, job: Callable[[], int]
) -> None:
    # Without it about one such job in eighty lost a rank that was still connecting.
    for _ in range(5):
        assert len(set(gloo_pool.run(job, 4))) == 4


def test_arguments_and_results_travel_bit_for_bit(gloo_pool: GlooPool) -> None:
    tensor = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (result,) = gloo_pool.run(pool_jobs.double, 1, tensor, factor=3)
    assert torch.equal(result, tensor * 3)


def test_a_job_sees_nothing_of_the_one_before(gloo_pool: GlooPool) -> None:
    clean = gloo_pool.run(pool_jobs.traces, 1)
    gloo_pool.run(pool_jobs.leave_traces, 1)
    assert gloo_pool.run(pool_jobs.traces, 1) == clean
    assert clean[0][:2] == (None, "torch.float32")


def test_a_function_that_cannot_be_imported_is_refused(gloo_pool: GlooPool) -> None:
    with pytest.raises(ValueError, match="cannot be imported"):
        gloo_pool.run(lambda: None, 1)


def test_a_failed_job_names_its_rank_and_the_next_one_gets_new_ranks() -> None:
    """An exception comes with its traceback and a hang with its stacks; a dead rank's message has
    its exit code, and a result that does not pickle is no hang."""
    with GlooPool() as pool:
        ranks = [pool.run(pool_jobs.process_id, 2)]
        with pytest.raises(PoolError) as caught:
            pool.run(pool_jobs.fail_on, 2, 1)
        assert (caught.value.rank, caught.value.kind) == (1, "LookupError")
        assert "planted failure" in caught.value.message
        assert "fail_on" in caught.value.details
        first = min(caught.value.reports, key=lambda report: report.time)
        assert (first.rank, first.summary) == (1, "LookupError: planted failure")

        ranks.append(pool.run(pool_jobs.process_id, 2))
        with pytest.raises(PoolError) as caught:
            pool.run(pool_jobs.hang_on, 2, 1, timeout=3.0)
        assert (caught.value.rank, caught.value.kind) == (1, "Hang")
        assert "hang_on" in caught.value.details

        ranks.append(pool.run(pool_jobs.process_id, 2))
        with pytest.raises(PoolError) as caught:
            pool.run(pool_jobs.die_on, 2, 1)
        assert (caught.value.rank, caught.value.kind) == (1, "Death")
        assert "exit code 7" in caught.value.message

        ranks.append(pool.run(pool_jobs.process_id, 1))
        assert len({process for job in ranks for process in job}) == 2 + 2 + 2 + 1
        with pytest.raises(PoolError, match=r"unpicklable|pickle"):
            pool.run(pool_jobs.unpicklable, 1)


def test_a_slow_start_is_reported_with_the_limit_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The limit is the longer one of the start's own and the job's, which the pool multiplies."""
    for own, factor, limit in ((0.0, 1.0, 0.001), (0.002, 1.0, 0.002), (0.0, 3.0, 0.003)):
        monkeypatch.setattr(pool_module, "START_SECONDS", own)
        with GlooPool(limit_factor=factor) as pool, pytest.raises(PoolError) as caught:
            pool.run(pool_jobs.process_id, 2, timeout=0.001)
        assert caught.value.kind == "Start"
        assert f"not ready {limit} s after its start" in caught.value.message
        assert "run less beside it, or raise the timeout" in caught.value.message


def test_a_rank_that_dies_while_it_starts_is_not_called_slow() -> None:
    with GlooPool(preload="no_such_module") as pool, pytest.raises(PoolError) as caught:
        pool.run(pool_jobs.process_id, 1)
    assert caught.value.kind == "Death"
    assert caught.value.message == "the process ended with exit code 1 while it started"
    assert "No module named 'no_such_module'" in caught.value.details


class HadEnough(Exception):
    """What a test's time limit raises in the middle of anything."""


def give_up(*_: object) -> None:
    raise HadEnough


def test_an_interrupted_job_leaves_no_rank() -> None:
    with GlooPool() as pool:
        ranks = pool.run(pool_jobs.process_id, 1)
        before = signal.signal(signal.SIGUSR1, give_up)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(HadEnough):
            pool.run(pool_jobs.hang_on, 1, 0, timeout=20.0)
        signal.signal(signal.SIGUSR1, before)
        assert not any(map(psutil.pid_exists, ranks)), "a late answer would be the next job's"
