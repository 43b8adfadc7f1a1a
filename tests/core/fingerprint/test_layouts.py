"""Equal weights have equal hashes, whichever ranks hold which part of them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import attrs
import pytest

from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
from tests.core.checkpoint.model_jobs import Case

from . import jobs

LAYOUTS = {
    "tp 2": Case(tp=2),
    "pp 2, tied": Case(pp=2, tied=True),
    "dp 2": Case(dp=2),
    "dp 2, distributed optimizer": Case(dp=2, distributed_optimizer=True),
    "dp 2, distributed optimizer, bf16": Case(
        dp=2, distributed_optimizer=True, precision="bf16", tied=True
    ),
    "tp 2, dp 2, distributed optimizer": Case(tp=2, dp=2, distributed_optimizer=True),
    "experts, ep 2, pp 2": Case(experts=4, ep=2, dp=2, pp=2),
    "experts, ep 2, distributed optimizer": Case(experts=4, ep=2, dp=2, distributed_optimizer=True),
}


def of_one_rank(case: Case) -> Case:
    return attrs.evolve(case, tp=1, pp=1, dp=1, ep=1, distributed_optimizer=False)


@pytest.fixture(scope="module")
def alone(gloo_pool: GlooPool) -> Callable[[Case, int], list[object]]:
    """The hash of one rank after some steps, made once for the layouts of one model."""

    @functools.cache
    def trained(case: Case, steps: int) -> list[object]:
        return gloo_pool.run(jobs.trained_hash, 1, case, steps)

    return trained


@pytest.mark.exhaustive(by=lambda case: [case.distributed_optimizer, f"{case.experts} experts"])
@pytest.mark.parametrize("case", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_trained_weights_have_the_hash_of_one_rank(
    gloo_pool: GlooPool, alone: Callable[[Case, int], list[object]], case: Case
) -> None:
    hashes = gloo_pool.run(jobs.trained_hash, case.world_size, case, 2)
    assert hashes == alone(of_one_rank(case), 2) * case.world_size
    assert alone(of_one_rank(case), 1) != alone(of_one_rank(case), 2)


SPREAD = {"ddp.use_distributed_optimizer": True}
LATE = {**SPREAD, "ddp.overlap_grad_reduce": True, "ddp.overlap_param_gather": True}


@pytest.mark.exhaustive(by=lambda world_size: [world_size])
@pytest.mark.parametrize(
    ("values", "layout", "world_size"),
    [
        (DENSE, LATE, 2),
        ({**DENSE, "train.precision": "fp16"}, LATE, 2),
        (DENSE, {"parallel.pipeline_model_parallel_size": 2, **SPREAD}, 4),
        (MOE, {"parallel.expert_model_parallel_size": 2, **SPREAD}, 4),
    ],
    ids=["gathered late", "gathered late, fp16", "pp 2 dp 2", "ep 2 dp 2"],
)
def test_a_run_begins_with_the_hash_of_one_rank(
    gloo_pool: GlooPool, values: dict[str, object], layout: dict[str, object], world_size: int
) -> None:
    hashes = gloo_pool.run(jobs.untrained_hash, world_size, {**values, **layout})
    assert hashes == gloo_pool.run(jobs.untrained_hash, 1, values) * world_size


def test_the_hash_is_what_its_description_says(gloo_pool: GlooPool) -> None:
    ((by_hand, ours),) = gloo_pool.run(jobs.hash_by_hand, 1, DENSE)
    assert ours == by_hand


def test_one_flipped_bit_of_any_parameter_is_seen(gloo_pool: GlooPool) -> None:
    (seen,) = gloo_pool.run(jobs.flips, 1, DENSE)
    assert len(seen) > 10
    assert all(seen.values()), seen
