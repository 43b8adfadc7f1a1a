"""Steps of the optimizer in float64, against the formula and against torch's AdamW and averages; on
the device of the platform of the tests."""

from __future__ import annotations

import math
import os
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ascend_run.ops.optimizer_states import create_states, state_problems
from ascend_run.plugin_api import RunConfig, TrainSection
from ascend_run.plugins.optimizers.ema_adamw import EmaAdamW, EmaAdamWConfig
from ascend_run.testing.runtime import PLATFORM_VARIABLE
from tests.support.tiny_configs import model_fields, parallel_fields

DEVICE: Final = os.environ.get(PLATFORM_VARIABLE, "cpu")
SHAPES = ((4, 3), (7,), (2, 2, 2))
DECAYS = (0.3, 0.0, 0.3)
"""Weight decay of each."""
STEPS = 6
OPTIONS: Any = {"lr": 0.03, "betas": (0.9, 0.97), "eps": 1e-6}


def draw(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    drawn = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    return drawn.to(DEVICE)


def model(dtype: torch.dtype = torch.float64) -> nn.ParameterList:
    return nn.ParameterList(draw(shape, at, dtype) for at, shape in enumerate(SHAPES))


def set_gradients(of: nn.ParameterList, step: int) -> None:
    for at, p in enumerate(of):
        p.grad = draw(tuple(p.shape), 100 * step + at, p.dtype)


def groups(of: nn.ParameterList) -> list[dict[str, Any]]:
    return [{"params": [p], "weight_decay": d} for p, d in zip(of, DECAYS, strict=True)]


def spec(**options: Any) -> Any:
    config = RunConfig(model=model_fields({}), parallel=parallel_fields())
    return EmaAdamW(EmaAdamWConfig(**options)).ascend_optimizer(config=config)


def optimizer(of: nn.ParameterList, **options: Any) -> torch.optim.Optimizer:
    built: torch.optim.Optimizer = spec(**options).build(groups(of))
    for group in built.param_groups:
        group.update(OPTIONS)
    return built


@pytest.mark.parametrize("decay", [0.0, 0.6, 0.9999, 1.0])
@pytest.mark.parametrize("warmup", [False, True])
def test_each_step_is_that_of_the_formula(decay: float, warmup: bool) -> None:
    ours = model()
    stepping = optimizer(ours, decay=decay, warmup=warmup)
    beta1, beta2 = OPTIONS["betas"]
    p, m, v, ema = ([[0.0] * x.numel() for x in ours] for _ in range(4))
    for at, x in enumerate(ours):
        p[at], ema[at] = x.flatten().tolist(), x.flatten().tolist()
    for t in range(1, STEPS + 1):
        set_gradients(ours, t)
        stepping.step()
        d = min(decay, (1 + t) / (10 + t)) if warmup else decay
        for at, x in enumerate(ours):
            for i, g in enumerate(x.grad.flatten().tolist()):
                m[at][i] = beta1 * m[at][i] + (1 - beta1) * g
                v[at][i] = beta2 * v[at][i] + (1 - beta2) * g * g
                size = math.sqrt(v[at][i] / (1 - beta2**t)) + OPTIONS["eps"]
                update = m[at][i] / (1 - beta1**t) / size + DECAYS[at] * p[at][i]
                p[at][i] -= OPTIONS["lr"] * update
                ema[at][i] = d * ema[at][i] + (1 - d) * p[at][i]
            state = stepping.state[x]
            assert float(state["step"]) == t
            for name, want in (("exp_avg", m), ("exp_avg_sq", v), ("ema", ema)):
                assert state[name].flatten().tolist() == pytest.approx(want[at], rel=1e-12)
            assert x.flatten().tolist() == pytest.approx(p[at], rel=1e-12)


def test_weights_and_averages_are_those_of_torch() -> None:
    """torch.optim.AdamW, and swa_utils.AveragedModel with an average of its EMA."""
    ours, theirs = model(), model()
    stepping = optimizer(ours, decay=0.8)
    reference = torch.optim.AdamW(groups(theirs), **OPTIONS, foreach=False)
    averaged = AveragedModel(theirs, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    averaged.update_parameters(theirs)  # its first call copies
    for t in range(1, STEPS + 1):
        for side, one in ((ours, stepping), (theirs, reference)):
            set_gradients(side, t)
            one.step()
        averaged.update_parameters(theirs)
        for x, y, average in zip(ours, theirs, averaged.module, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(stepping.state[x]["ema"], average, rtol=1e-12, atol=1e-14)
            assert not torch.equal(average, y)


def test_weights_and_moments_have_the_bits_of_the_built_in_optimizer() -> None:
    ours, plain = model(torch.float32), model(torch.float32)
    stepping = optimizer(ours)
    reference = torch.optim.AdamW(groups(plain), **OPTIONS, fused=True)
    for t in range(1, STEPS + 1):
        for side, one in ((ours, stepping), (plain, reference)):
            set_gradients(side, t)
            one.step()
    for x, y in zip(ours, plain, strict=True):
        assert torch.equal(x, y)
        for name, state in reference.state[y].items():
            assert torch.equal(stepping.state[x][name], state), name


@pytest.mark.parametrize("warmup", [False, True])
def test_a_parameter_without_gradient_has_no_step(warmup: bool) -> None:
    """Nor its average; its count of steps is its own."""
    ours, alone = model(), model()
    stepping, reference = optimizer(ours, warmup=warmup), optimizer(alone, warmup=warmup)
    set_gradients(ours, 1)
    ours[1].grad = None
    before = ours[1].detach().clone()
    stepping.step()
    assert torch.equal(ours[1], before)
    assert ours[1] not in stepping.state
    for side, one in ((ours, stepping), (alone, reference)):
        set_gradients(side, 2)
        one.step()
    assert torch.equal(ours[1], alone[1])
    for name, state in reference.state[alone[1]].items():
        assert torch.equal(stepping.state[ours[1]][name], state), name


def test_states_are_as_declared_before_and_after_the_first_step() -> None:
    ours = model(torch.float32)
    stepping, declared = optimizer(ours), spec().states
    assert create_states(stepping, declared) == []
    assert state_problems(stepping, declared) == []
    for p in ours:
        assert torch.equal(stepping.state[p]["ema"], p)
        assert stepping.state[p]["ema"].data_ptr() != p.data_ptr()
    fresh = optimizer(model(torch.float32))
    for p in (q for group in fresh.param_groups for q in group["params"]):
        p.grad = torch.ones_like(p)
    fresh.step()
    assert state_problems(fresh, declared) == []


@pytest.mark.parametrize("decay", [-0.1, 1.1])
def test_a_decay_out_of_range_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match="decay"):
        EmaAdamWConfig(decay=decay)


def test_averages_are_evaluated_only_where_evaluations_are() -> None:
    for evaluate, interval, refused in ((True, 0, True), (True, 2, False), (False, 0, False)):
        config = RunConfig(
            model=model_fields({}),
            parallel=parallel_fields(),
            train=TrainSection(eval_interval=interval),
        )
        problems = EmaAdamW(EmaAdamWConfig(evaluate=evaluate)).ascend_check(config=config)
        assert any("train.eval_interval=0 has none" in text for text in problems) is refused
