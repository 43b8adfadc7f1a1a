"""Optimizers of third parties: replicated and distributed, saved and resumed in other layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import HookError, OptimizerSpec, hookimpl
from ascend_run.testing.models import DENSE
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.tensors import full_tensors
from ascend_run.tools.plan.cost_model.estimate import expected_costs
from tests.support.optimizers import SPECS, Optimizes
from tests.support.small_runs import prepare, training

from .optimizer_jobs import loaded, saved, stepped
from .runs import Runs
from .trials import PP, TP

FLAT = {
    **DENSE,
    "model.num_layers": 3,  # two ranges of an even number would end between parameters
    "optimizer.lr": 0.01,
    "optimizer.weight_decay": 0.5,
    "optimizer.clip_grad": 0.0,  # the norm is summed in another order
}
DISTRIBUTED = {"ddp.use_distributed_optimizer": True}
BF16 = {"train.precision": "bf16"}
TIED = {
    **FLAT,
    **BF16,
    "model.num_layers": 4,
    "model.share_embeddings_and_output_weights": True,
}
STEPS = 5


@pytest.mark.exhaustive(by=lambda name, layout: (name == "lion", *layout))
@pytest.mark.parametrize(
    ("name", "layout", "world_size"),
    [
        ("lion", {}, 2),
        ("lion-bf16", BF16, 2),
        ("sgd", {**TP, **BF16}, 4),
        ("adagrad", {}, 2),
        ("rmsprop", BF16, 2),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_distributed_optimizer_updates_like_a_replicated_one(
    gloo_pool: GlooPool, name: str, layout: Mapping[str, Any], world_size: int
) -> None:
    """Bitwise: weights, master weights and every state."""
    found = []
    for ddp in ({}, DISTRIBUTED):
        values = {**FLAT, **layout, **ddp}
        ranks = gloo_pool.run(stepped, world_size, values, name, STEPS, timeout=100)
        found.append(full_tensors([rank.outcome for rank in ranks]))
        assert any(rank.has_parts for rank in ranks) == bool(ddp)
        assert_planned(values, name, [rank.state_bytes for rank in ranks])
    want, got = found
    assert got.problems() == want.problems() == []
    states = {key.split("/")[1] for key in want.tensors if key.startswith("optimizer/")}
    assert states == {*SPECS[name].states, *(["main_param"] if "train.precision" in layout else [])}
    assert_equal(got.tensors, want.tensors)


def assert_planned(values: Mapping[str, Any], name: str, held: Sequence[int]) -> None:
    """Assert that ``plan`` counts the bytes that the ranks hold.

    A distributed optimizer has a scalar of each range, and the plan one of each parameter.
    """
    prepared = prepare(values, (), len(held))
    hooks = Hooks([*prepared.instances(), Optimizes(name)])
    (cost,) = expected_costs(prepared.config, prepared.layout, hooks)
    slack = 8 * len(cost.rank.parameters) if prepared.config.ddp.use_distributed_optimizer else 0
    assert abs(sum(held) / len(held) - cost.memory.optimizer) <= slack
    assert slack < 0.01 * cost.memory.optimizer


def assert_equal(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    assert [key for key, tensor in want.items() if not torch.equal(got[key], tensor)] == []


@pytest.mark.exhaustive(by=lambda resumed: [resumed[1]] if resumed[1] == 1 else [])
@pytest.mark.parametrize(
    ("name", "begun", "resumed"),
    [
        ("lion-bf16", ({**TP, **DISTRIBUTED}, 4), ({**PP, **DISTRIBUTED}, 4)),
        ("adagrad", (DISTRIBUTED, 2), ({}, 1)),
    ],
    ids=["tp2 dp2 to pp2 dp2", "dp2 to one rank"],
)
def test_declared_states_are_loaded_in_another_layout(
    gloo_pool: GlooPool, tmp_path: Path, name: str, begun: Any, resumed: Any
) -> None:
    """Bitwise: weights, master weights and every state."""
    want, got = (
        full_tensors(gloo_pool.run(job, size, {**TIED, **layout}, name, str(tmp_path), timeout=100))
        for job, (layout, size) in ((saved, begun), (loaded, resumed))
    )
    assert got.problems() == want.problems() == []
    assert_equal(got.tensors, want.tensors)


def test_a_stopped_run_of_another_optimizer_resumes_bitwise(
    gloo_pool: GlooPool, tmp_path: Path
) -> None:
    kind = ({**FLAT, **BF16, **DISTRIBUTED}, 2, ())
    Runs(gloo_pool, tmp_path, kind, Optimizes("lion-bf16")).assert_the_same_in_two_halves()


def test_states_that_are_not_declared_end_the_first_step() -> None:
    class Undeclared(Optimizes):
        @hookimpl
        def ascend_optimizer(self) -> OptimizerSpec:
            return attrs.evolve(SPECS["sgd"], states={})

    with (
        training(FLAT, (), Undeclared("sgd")) as run,
        pytest.raises(HookError, match=r"'momentum_buffer' is float32 .* is absent"),
    ):
        run.step()


def test_parameter_groups_have_the_options_of_the_optimizer_alone() -> None:
    """AdamW's, which Megatron is constructed with, are not among them."""
    with training(FLAT, (), Optimizes("lion")) as run:
        for group in run.bundle.optimizer.param_groups:
            assert group["betas"] == (0.9, 0.99)
            assert "eps" not in group
