"""A step whose last samples train nothing is the step of those that do, however it is split."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ascend_run.plugin_api.testing.models import DENSE, samples
from ascend_run.plugin_api.testing.pool import GlooPool
from tests.support.small_runs import Values, training

from .trials import PP, VPP

FULL, LEFT = 8, 5
VALUES = {**DENSE, "model.num_layers": 4, "train.global_batch_size": FULL}


def step_of(values: Values) -> tuple[float, int, float]:
    """Loss, tokens and gradient norm; a job for the pool."""
    with training(values) as run:
        made = samples(values, values["train.global_batch_size"])
        for empty in made[LEFT:]:
            empty["loss_mask"].zero_()
        result = run.train_step(run.rehearsal.batches(made), run.plan.num_micro_batches)
        return result.loss, result.num_tokens, result.grad_norm


@pytest.mark.parametrize(
    ("layout", "micro_batch_size", "world_size"),
    [({}, 1, 1), ({}, 4, 1), ({}, 1, 2), ({}, 4, 2), ({}, 2, 4), (PP, 1, 2), (VPP, 2, 4)],
    ids=["1x8", "4x2", "dp 1x4", "dp 4x1", "dp4 2x1", "pp", "vpp dp"],
)
def test_a_window_that_is_not_full_is_the_mean_over_what_it_holds(
    gloo_pool: GlooPool, layout: Mapping[str, Any], micro_batch_size: int, world_size: int
) -> None:
    """With four data-parallel ranks the last one has no token at all."""
    alone = {"train.global_batch_size": LEFT, "train.micro_batch_size": LEFT}
    ((loss, tokens, norm),) = gloo_pool.run(step_of, 1, {**VALUES, **alone})
    values = {**VALUES, **layout, "train.micro_batch_size": micro_batch_size}
    for outcome in gloo_pool.run(step_of, world_size, values):
        assert outcome[0] == pytest.approx(loss, rel=1e-6)
        assert outcome[1] == tokens
        assert outcome[2] == pytest.approx(norm, rel=1e-5)
