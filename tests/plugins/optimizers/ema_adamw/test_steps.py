"""Runs with ema-adamw against runs of the built-in optimizer, on the platform of the tests; its
states in checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from ascend_run.core.hooks import Hooks
from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import PLATFORM_VARIABLE
from ascend_run.testing.tensors import full_tensors
from ascend_run.tools.plan.cost_model.estimate import expected_costs
from tests.support.optimizer_runs import Steps, loaded, saved, stepwise
from tests.support.small_runs import prepare

NAME: Final = ("ema-adamw",)
DECAY: Final = 0.7
STEPS: Final = 5
FLAT: Final[Mapping[str, Any]] = {
    "model.num_layers": 3,  # two ranges of an even number would end between parameters
    "optimizer.lr": 0.01,
    "optimizer.weight_decay": 0.5,
}
DISTRIBUTED: Final = {"ddp.use_distributed_optimizer": True}
TP: Final = {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}
PP: Final = {"parallel.pipeline_model_parallel_size": 2}
EP: Final = {"parallel.expert_model_parallel_size": 2}
BF16: Final = {"train.precision": "bf16"}
CLIPPED: Final = {"optimizer.clip_grad": 0.05}
OVERFLOWING: Final = {
    "train.precision": "fp16",
    "optimizer.initial_loss_scale": 2.0**24,
    "optimizer.hysteresis": 1,
}
"""Its first steps overflow, each of which halves the scale."""


def full(steps: list[Steps], at: int) -> Mapping[str, Tensor]:
    found = full_tensors(one.outcomes[at] for one in steps)
    assert found.problems() == []
    return found.tensors


def masters(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights that the optimizer updates, by parameter."""
    weights = {k.removeprefix("model/"): t for k, t in tensors.items() if k.startswith("model/")}
    prefix = "optimizer/main_param/"
    half = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
    return {**weights, **half}


@pytest.mark.exhaustive(by=lambda values, ranks: [values["train.precision"]] if ranks < 4 else [])
@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        pytest.param({**DENSE, **CLIPPED}, 1, id="one rank"),
        pytest.param({**DENSE, **BF16, **DISTRIBUTED}, 2, id="bf16 distributed"),
        pytest.param({**DENSE, **OVERFLOWING, "train.train_iters": 20}, 1, id="fp16 overflows"),
        pytest.param({**MOE, **BF16, **TP, **EP, **DISTRIBUTED}, 4, id="bf16 moe tp2 ep2 dp2"),
    ],
)
def test_weights_are_the_built_in_ones_and_the_average_follows(
    gloo_pool: GlooPool, values: Mapping[str, Any], ranks: int
) -> None:
    """Weights, master weights and moments bitwise; the average as recomputed in float64."""
    values = {**values, **FLAT, "platform": os.environ.get(PLATFORM_VARIABLE, "cpu")}
    steps = 16 if values["train.precision"] == "fp16" else STEPS
    averaging = {**values, "plugins.ema-adamw.decay": DECAY}
    plain = gloo_pool.run(stepwise, ranks, values, (), steps, timeout=100)
    ours = gloo_pool.run(stepwise, ranks, averaging, NAME, steps, timeout=100)
    assert ours[0].skipped == plain[0].skipped
    if values["train.precision"] == "fp16":
        assert ours[0].skipped[0]
        assert not ours[0].skipped[-1]
    assert any(one.has_parts for one in ours) == ("ddp.use_distributed_optimizer" in values)
    ema: dict[str, Tensor] = {}
    for at in range(steps + 1):
        want, got = full(plain, at), dict(full(ours, at))
        averages = {name: got.pop(f"optimizer/ema/{name}").double() for name in masters(want)}
        assert got.keys() == want.keys()
        assert [key for key, tensor in want.items() if not torch.equal(got[key], tensor)] == []
        if not ema:
            ema = {name: tensor.double() for name, tensor in masters(want).items()}
        elif not plain[0].skipped[at - 1]:
            for name, tensor in masters(want).items():
                ema[name] = DECAY * ema[name] + (1 - DECAY) * tensor.double()
        torch.testing.assert_close(averages, ema, rtol=1e-6, atol=1e-7)
    assert any(not torch.equal(ema[name], w.double()) for name, w in masters(want).items())
    assert_planned(averaging, [one.state_bytes for one in ours])


def assert_planned(values: Mapping[str, Any], held: list[int]) -> None:
    """Assert that ``plan`` counts the bytes that the ranks hold.

    A distributed optimizer has a scalar of each range, and the plan one of each parameter.
    """
    prepared = prepare(values, NAME, len(held))
    (cost,) = expected_costs(prepared.config, prepared.layout, Hooks(prepared.instances()))
    slack = 8 * len(cost.rank.parameters) if prepared.config.ddp.use_distributed_optimizer else 0
    assert abs(sum(held) / len(held) - cost.memory.optimizer) <= slack
    assert slack < 0.01 * cost.memory.optimizer


@pytest.mark.exhaustive(by=lambda resumed: [resumed[1]] if resumed[1] == 1 else [])
@pytest.mark.parametrize(
    ("begun", "resumed"),
    [
        pytest.param(({**TP, **DISTRIBUTED}, 4), ({**PP, **DISTRIBUTED}, 4), id="tp2 to pp2"),
        pytest.param((DISTRIBUTED, 2), ({}, 1), id="dp2 to one rank"),
    ],
)
def test_averages_are_loaded_in_another_layout(
    gloo_pool: GlooPool, tmp_path: Path, begun: Any, resumed: Any
) -> None:
    """Bitwise: weights, master weights and every state."""
    values = {**DENSE, **FLAT, **BF16, "model.num_layers": 4}
    want, got = (
        full_tensors(gloo_pool.run(job, size, {**values, **layout}, NAME, str(tmp_path)))
        for job, (layout, size) in ((saved, begun), (loaded, resumed))
    )
    assert got.problems() == want.problems() == []
    assert any(key.startswith("optimizer/ema/") for key in want.tensors)
    assert got.tensors.keys() == want.tensors.keys()
    apart = [key for key, t in want.tensors.items() if not torch.equal(got.tensors[key], t)]
    assert apart == []
