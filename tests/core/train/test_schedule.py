"""The learning rate of each step against its formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from ascend_run.testing.models import DENSE
from tests.support.small_runs import training

WARMUP, DECAY, HIGH, LOW = 3, 10, 0.5, 0.1
FINAL = 4
"""Steps of WSD's own decay."""


def shares_to_rates(share: Callable[[float], float]) -> Callable[[int], float]:
    """From the part of the way down that is left, of the part of the steps that are done."""
    return lambda step: LOW + (HIGH - LOW) * share((step - WARMUP) / (DECAY - WARMUP))


def wsd(share: Callable[[float], float]) -> Callable[[int], float]:
    """Flat until the last FINAL steps."""
    return lambda step: LOW + (HIGH - LOW) * share(max(0.0, (step - DECAY + FINAL) / FINAL))


RULES: dict[str, Callable[[int], float]] = {
    "constant": lambda step: HIGH,
    "linear": shares_to_rates(lambda part: 1 - part),
    "cosine": shares_to_rates(lambda part: (1 + math.cos(math.pi * part)) / 2),
    "WSD linear": wsd(lambda part: 1 - part),
    "WSD cosine": wsd(lambda part: (1 + math.cos(math.pi * part)) / 2),
    "WSD exponential": wsd(lambda part: 2 * 0.5**part - 1),
    "WSD minus_sqrt": wsd(lambda part: 1 - math.sqrt(part)),
}


@pytest.mark.parametrize("name", RULES)
def test_each_step_uses_and_logs_the_rate_of_the_formula(name: str) -> None:
    style, _, final = name.partition(" ")
    options: dict[str, Any] = {"optimizer.lr_decay_style": style}
    if final:
        options |= {
            "optimizer.lr_wsd_decay_style": final,
            "optimizer.lr_wsd_decay_iters": FINAL,
        }
    values = {
        **DENSE,
        "model.num_layers": 1,
        "train.global_batch_size": 1,
        "train.train_iters": DECAY + 2,
        "optimizer.lr": HIGH,
        "optimizer.min_lr": LOW,
        "optimizer.lr_warmup_iters": WARMUP,
        "optimizer.lr_decay_iters": DECAY,
        **options,
    }
    after_warmup = RULES[name]
    with training(values) as run:
        used: list[float] = []
        inner = run.bundle.optimizer.optimizer
        inner.register_step_pre_hook(
            lambda inner, *_: used.append({group["lr"] for group in inner.param_groups}.pop())
        )
        told = [run.step().learning_rate for _ in range(DECAY + 2)]
    wanted = [
        HIGH * done / WARMUP
        if done < WARMUP
        else after_warmup(done)
        if done <= DECAY or style == "constant"
        else LOW
        for done in range(DECAY + 2)
    ]
    assert used == pytest.approx(wanted, abs=1e-12)
    assert told == used


def test_without_warmup_the_first_step_is_at_the_full_rate() -> None:
    values = {**DENSE, "optimizer.lr": HIGH, "optimizer.lr_warmup_iters": 0}
    with training(values) as run:
        assert run.step().learning_rate == HIGH
        assert run.step().learning_rate < HIGH
