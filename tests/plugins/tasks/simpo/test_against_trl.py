"""Ten steps against trl: losses, gradient norms and every metric, in each variant that trl has.

Its hinge takes sums over tokens where ours takes means, and no target margin.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ascend_run.testing.pool import GlooPool
from tests.core.train.runs import whole_run
from tests.support.preference_files import assert_equal_steps, write_models_and_pairs
from tests.support.task_runs import BATCH, STEPS
from tests.support.trl_steps import TrlSteps

from .test_training import values


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models_and_pairs(tmp_path_factory.mktemp("simpo"), STEPS * BATCH)


# The paper's gamma is beta times ours, so 3.5 by default.
SIGMOID = {"loss_type": "simpo", "beta": 2.5, "simpo_gamma": 3.5, "cpo_alpha": 0.0}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "sigmoid": ({}, SIGMOID, BATCH),
    "margin": (
        {"beta": 2.0, "gamma_beta_ratio": 0.5},
        {**SIGMOID, "beta": 2.0, "simpo_gamma": 1.0},
        2,
    ),
    "smoothing": ({"label_smoothing": 0.1}, {**SIGMOID, "label_smoothing": 0.1}, BATCH),
    "ipo": (
        {"loss": "ipo", "beta": 1.0, "gamma_beta_ratio": 0.0},
        {"loss_type": "ipo", "beta": 1.0, "cpo_alpha": 0.0},
        BATCH,
    ),
    # trl's mean is over all tokens of a forward pass, ours over those of each answer.
    "sft_weight": ({"sft_weight": 0.5}, {**SIGMOID, "cpo_alpha": 0.5}, 1),
}


@pytest.mark.exhaustive(by=lambda variant: [])
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_is_that_of_trl(
    gloo_pool: GlooPool, models: Path, tmp_path: Path, variant: str
) -> None:
    ours, theirs, at_once = VARIANTS[variant]
    options = {f"plugins__simpo__{name}": value for name, value in ours.items()}
    run = values(models, tmp_path / "run", train__micro_batch_size=2, **options)
    (ended,) = gloo_pool.run(whole_run, 1, run, timeout=100)
    steps = TrlSteps(
        models=models, batch=BATCH, trainer="cpo", options=theirs, at_once=at_once
    ).run(tmp_path / "trl")
    assert_equal_steps(ended.readings, steps)
