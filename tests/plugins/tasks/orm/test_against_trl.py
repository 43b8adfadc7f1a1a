"""Ten steps against trl: losses, gradient norms, accuracies and margins, in each variant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ascend_run.testing.pool import GlooPool
from tests.core.train.runs import whole_run
from tests.support.plain_rewards import write_scorer
from tests.support.preference_files import assert_equal_steps, write_models_and_pairs
from tests.support.task_runs import BATCH, STEPS
from tests.support.trl_rewards import METRICS, TrlRewards

from .test_training import values


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_models_and_pairs(tmp_path_factory.mktemp("orm"), STEPS * BATCH)
    write_scorer(folder / "model-scorer", folder / "model")
    return folder


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "margin": ({"margin": 0.5}, {"margin": 0.5}),
    "centering": (
        {"center_rewards_coefficient": 0.1},
        {"options": {"center_rewards_coefficient": 0.1}},
    ),
}


@pytest.mark.exhaustive(by=lambda variant: [])
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_is_that_of_trl(
    gloo_pool: GlooPool, models: Path, tmp_path: Path, variant: str
) -> None:
    ours, theirs = VARIANTS[variant]
    options = {f"plugins__orm__{name}": value for name, value in ours.items()}
    run = values(models, tmp_path / "run", train__micro_batch_size=2, **options)
    (ended,) = gloo_pool.run(whole_run, 1, run, timeout=100)
    steps = TrlRewards(models=models, batch=BATCH, **theirs).run(tmp_path / "trl")
    assert_equal_steps(ended.readings, steps, [*METRICS.values()])
