"""Unmodified Megatron on the CPU: every layout of ranks trains the same model to the same loss."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import torch
import torch.distributed as dist

from ascend_run.testing.pool import GlooPool

from . import megatron_training as training
from .megatron_training import Case, Outcome

TOLERANCE = 1e-5
"""float32, layouts have different reduction orders; see design.md, section 8."""

DENSE_LAYOUTS = {
    "tensor-parallel": Case(tp=2),
    "pipeline-parallel": Case(pp=2),
    "data-parallel": Case(),
    "distributed-optimizer": Case(distributed_optimizer=True),
    "distributed-optimizer-averaging": Case(distributed_optimizer=True, average_in_collective=True),
    "averaging": Case(average_in_collective=True),
}
EXPERT_LAYOUTS = {
    "expert-parallel": Case(experts=True, ep=2),
    "expert-parallel-distributed-optimizer": Case(experts=True, ep=2, distributed_optimizer=True),
}


@pytest.fixture
def one_rank_world() -> Iterator[None]:
    dist.init_process_group(
        "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        timeout=datetime.timedelta(seconds=60),
    )
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def dense_on_one_rank(gloo_pool: GlooPool) -> Outcome:
    return gloo_pool.run(training.train, 1, Case(), timeout=120)[0]


@pytest.fixture(scope="module")
def experts_on_one_rank(gloo_pool: GlooPool) -> Outcome:
    return gloo_pool.run(training.train, 1, Case(experts=True), timeout=120)[0]


def test_a_gpt_model_trains_in_this_very_process(one_rank_world: None) -> None:
    outcome = training.train(Case(steps=4))
    assert outcome.losses[-1] < outcome.losses[0] - 0.5


def test_no_function_mode_is_active_inside_a_layer(dense_on_one_rank: Outcome) -> None:
    assert dense_on_one_rank.modes_in_forward == 0


@pytest.mark.exhaustive(by=lambda name: attrs.asdict(DENSE_LAYOUTS[name]).items())
@pytest.mark.parametrize("name", DENSE_LAYOUTS)
def test_a_dense_model_trains_alike_on_two_ranks(
    gloo_pool: GlooPool, dense_on_one_rank: Outcome, name: str
) -> None:
    _assert_alike(gloo_pool, DENSE_LAYOUTS[name], dense_on_one_rank)


@pytest.mark.parametrize("name", EXPERT_LAYOUTS)
def test_experts_train_alike_on_two_ranks(
    gloo_pool: GlooPool, experts_on_one_rank: Outcome, name: str
) -> None:
    _assert_alike(gloo_pool, EXPERT_LAYOUTS[name], experts_on_one_rank)


def test_bf16_with_the_distributed_optimizer_follows_float32(
    gloo_pool: GlooPool, dense_on_one_rank: Outcome
) -> None:
    case = Case(precision="bf16", distributed_optimizer=True)
    outcome = gloo_pool.run(training.train, 2, case, timeout=120)[0]
    assert outcome.losses == pytest.approx(dense_on_one_rank.losses, rel=2e-2)


def test_two_instances_of_the_distributed_optimizer_overlap(gloo_pool: GlooPool) -> None:
    """Megatron enters one stream's context for both of its reductions."""
    for gradient in gloo_pool.run(training.gradient_of_two_instances, 2, timeout=120):
        assert torch.equal(gradient, torch.tensor([[5.0, 6.0, 7.0, 8.0]]))


def test_a_group_asked_for_with_nccl_is_gloo(gloo_pool: GlooPool, tmp_path: Path) -> None:
    assert (
        gloo_pool.run(training.backends_of_nccl, 2, str(tmp_path / "store"))
        == [("gloo", "gloo")] * 2
    )


def _assert_alike(pool: GlooPool, case: Case, expected: Outcome) -> None:
    for outcome in pool.run(training.train, 2, case, timeout=120):
        assert outcome.losses == pytest.approx(expected.losses, rel=TOLERANCE)
        assert outcome.gradient_norms == pytest.approx(expected.gradient_norms, rel=TOLERANCE)
    assert torch.tensor(expected.losses).diff().max() < 0
