"""A step whose last samples train nothing is the step of those that do, however it is split."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ascend_run.testing.models import DENSE, samples
from ascend_run.testing.pool import GlooPool
from tests.support.small_runs import Values, training

from .trials import PP, VPP

FULL: Final = 8
VALUES = {**DENSE, "model.num_layers": 4, "train.global_batch_size": FULL}
SPLITS: Final[Mapping[str, tuple[Mapping[str, Any], int, int]]] = {
    "1x8": ({}, 1, 1),
    "4x2": ({}, 4, 1),
    "dp 1x4": ({}, 1, 2),
    "dp 4x1": ({}, 4, 2),
    "dp4 1x2": ({}, 1, 4),
    "dp4 2x1": ({}, 2, 4),
    "pp": (PP, 1, 2),
    "pp 4x2": (PP, 4, 2),
    "vpp dp": (VPP, 2, 4),
}
"""Layout, micro-batch size and ranks."""


def step_of(values: Values, left: int) -> tuple[float, int, float]:
    """Loss, tokens and gradient norm of so many samples that train; a job for the pool."""
    with training(values) as run:
        made = samples(values, values["train.global_batch_size"])
        for empty in made[left:]:
            empty["loss_mask"].zero_()
        result = run.train_step(run.dry_run.batches(made), run.plan.num_microbatches)
        return result.loss, result.totals.num_tokens, result.grad_norm


@settings(max_examples=6, deadline=None)
@given(split=st.sampled_from(sorted(SPLITS)), left=st.integers(1, FULL))
@example(split="dp4 2x1", left=5)  # the last rank has no token at all
@example(split="vpp dp", left=3)
def test_a_window_that_is_not_full_is_the_mean_over_what_it_holds(
    gloo_pool: GlooPool, split: str, left: int
) -> None:
    layout, micro_batch_size, world_size = SPLITS[split]
    alone = {"train.global_batch_size": left, "train.micro_batch_size": left}
    ((loss, tokens, norm),) = gloo_pool.run(step_of, 1, {**VALUES, **alone}, left)
    values = {**VALUES, **layout, "train.micro_batch_size": micro_batch_size}
    for outcome in gloo_pool.run(step_of, world_size, values, left):
        assert outcome[0] == pytest.approx(loss, rel=1e-6)
        assert outcome[1] == tokens
        assert outcome[2] == pytest.approx(norm, rel=1e-5)
