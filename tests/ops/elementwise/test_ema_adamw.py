"""Steps of AdamW with an EMA of the parameters, against torch's optimizers and the formula."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ascend_run.ops.elementwise.ema_adamw import (
    ema_adamw_step_,
    fused_ema_adamw_step_,
    warmed_up_decay,
)

from . import elementwise as check

LR, BETAS, EPS, DECAY, EMA = 3e-2, (0.9, 0.97), 1e-6, 0.1, 0.95
SHAPES = ((4, 3), (7,), ())
Step = Callable[..., None]


def run(step_: Step, steps: int, **options: bool) -> list[list[Tensor]]:
    """Return (parameters, first moments, second moments, averages) after some steps."""
    params = [check.draw(*shape, seed=i).detach() for i, shape in enumerate(SHAPES)]
    first, second = ([torch.zeros_like(p) for p in params] for _ in range(2))
    averages = [p.clone() for p in params]
    for step in range(1, steps + 1):
        grads = gradients(step)
        step_(
            params,
            grads,
            first,
            second,
            averages,
            step=step,
            lr=LR,
            betas=BETAS,
            eps=EPS,
            weight_decay=DECAY,
            ema_decay=EMA,
            **options,
        )
        assert all(map(torch.equal, grads, gradients(step)))
    return [params, first, second, averages]


def gradients(step: int) -> list[Tensor]:
    return [check.draw(*shape, seed=10 * step + i).detach() for i, shape in enumerate(SHAPES)]


@pytest.mark.parametrize("step_", [ema_adamw_step_, fused_ema_adamw_step_])
@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
def test_steps_are_torchs_and_the_average_follows(step_: Step, decoupled: bool) -> None:
    params = [check.draw(*shape, seed=i) for i, shape in enumerate(SHAPES)]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    theirs = kind(params, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, foreach=False)
    averages = [p.detach().clone() for p in params]
    for step in range(1, 6):
        for p, grad in zip(params, gradients(step), strict=True):
            p.grad = grad
        theirs.step()
        averages = [EMA * s + (1 - EMA) * p.detach() for s, p in zip(averages, params, strict=True)]
    state = [theirs.state[p] for p in params]
    want = [
        [p.detach() for p in params],
        [s["exp_avg"] for s in state],
        [s["exp_avg_sq"] for s in state],
        averages,
    ]
    torch.testing.assert_close(run(step_, 5, decoupled=decoupled), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("step_", [ema_adamw_step_, fused_ema_adamw_step_])
def test_without_bias_correction_the_averages_are_taken_as_they_are(step_: Step) -> None:
    params, *_ = run(step_, 1, bias_correction=False)
    for index, (shape, g) in enumerate(zip(SHAPES, gradients(1), strict=True)):
        p = check.draw(*shape, seed=index).detach()
        m, v = (1 - BETAS[0]) * g, (1 - BETAS[1]) * g * g
        want = p - LR * (m / (v.sqrt() + EPS) + DECAY * p)
        torch.testing.assert_close(params[index], want, rtol=0, atol=1e-12)


def test_the_decay_warms_up() -> None:
    assert warmed_up_decay(0.9999, 0) == 0.1
    assert warmed_up_decay(0.9999, 90) == 0.91
    assert warmed_up_decay(0.5, 1000) == 0.5
