"""Runs with low-precision-optimizer: planned, resumed, and interchanged with AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from ascend_run.core.hooks import Hooks
from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.tensors import full_tensors
from ascend_run.tools.plan.cost_model.estimate import expected_costs
from tests.core.train.runs import Runs
from tests.support.optimizer_runs import held_bytes, loaded, saved, stepwise
from tests.support.small_runs import prepare

NAME: Final = ("low-precision-optimizer",)
BF16: Final = {"train.precision": "bf16"}
DISTRIBUTED: Final = {"ddp.use_distributed_optimizer": True}
TP: Final = {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}
EP: Final = {"parallel.expert_model_parallel_size": 2}


@pytest.mark.exhaustive(by=lambda values, ranks: [*({*values} & {*DISTRIBUTED}), ranks])
@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        pytest.param({**DENSE, **BF16}, 1, id="dense"),
        pytest.param({**MOE, **EP}, 2, id="moe ep2"),
        pytest.param({**DENSE, **BF16, **DISTRIBUTED}, 2, id="distributed"),
    ],
)
def test_plan_counts_the_states_that_the_ranks_hold(
    gloo_pool: GlooPool, values: Mapping[str, Any], ranks: int
) -> None:
    """About a quarter of AdamW's for the matrices; a range of a distributed optimizer rounds up to
    a block."""
    held = sum(gloo_pool.run(held_bytes, ranks, values, NAME, timeout=100))
    cost = {}
    for names in (NAME, ()):
        prepared = prepare(values, names, ranks)
        hooks = Hooks(prepared.instances())
        (cost[names],) = expected_costs(prepared.config, prepared.layout, hooks)
    is_spread = "ddp.use_distributed_optimizer" in values
    slack = 24 * len(cost[NAME].rank.parameters) if is_spread else 0
    assert abs(held - ranks * cost[NAME].memory.optimizer) <= slack
    masters = 4 * cost[()].trained_parameters / (ranks if is_spread else 1)
    masters = masters if values["train.precision"] == "bf16" else 0.0
    ours, adamw = (cost[names].memory.optimizer - masters for names in (NAME, ()))
    assert 0.25 < ours / adamw < 0.27


def test_a_checkpoint_is_that_of_adamw(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """Names, shapes and dtypes; each loads that of the other, in another layout."""
    values = {**DENSE, **BF16, "model.num_layers": 4}
    for writer, reader in ((NAME, ()), ((), NAME)):
        folder = str(tmp_path / f"by {writer}")
        begun, resumed = {**values, **TP, **DISTRIBUTED}, {**values, **DISTRIBUTED}
        want = full_tensors(gloo_pool.run(saved, 4, begun, writer, folder))
        got = full_tensors(gloo_pool.run(loaded, 2, resumed, reader, folder))
        assert want.problems() == got.problems() == []
        assert got.tensors.keys() == want.tensors.keys()
        apart = [k for k, t in want.tensors.items() if not torch.equal(got.tensors[k], t)]
        assert apart == []
        states = {key.split("/")[1] for key in want.tensors if key.startswith("optimizer/")}
        assert states == {"step", "exp_avg", "exp_avg_sq", "main_param"}


@pytest.mark.exhaustive(by=lambda values: values)
@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        pytest.param({**DENSE, **BF16}, 1, id="bf16"),
        pytest.param({**MOE, **BF16, **EP, **DISTRIBUTED}, 2, id="moe ep2 distributed"),
    ],
)
def test_a_stopped_run_resumes_bitwise(
    gloo_pool: GlooPool, tmp_path: Path, values: Mapping[str, Any], ranks: int
) -> None:
    Runs(gloo_pool, tmp_path, (values, ranks, NAME)).assert_the_same_in_two_halves()


def test_losses_stay_near_those_of_adamw(gloo_pool: GlooPool) -> None:
    """And are not equal to them."""
    values = {**DENSE, "optimizer.lr": 0.01, "optimizer.lr_decay_style": "constant"}
    found = []
    for names in (NAME, ()):
        (one,) = gloo_pool.run(stepwise, 1, values, names, 8, timeout=100)
        found.append(full_tensors([one.outcomes[-1]]).tensors)
    ours, adamw = found
    for key, weight in adamw.items():
        if key.startswith("model/"):
            error = float((ours[key] - weight).abs().max())
            assert error < 0.04
            assert error > 0 or weight.ndim == 1
