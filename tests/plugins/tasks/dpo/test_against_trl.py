"""Ten steps against trl: losses, gradient norms and every metric, in each variant."""

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
    return write_models_and_pairs(tmp_path_factory.mktemp("dpo"), STEPS * BATCH)


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sigmoid": ({}, {"at_once": BATCH, "options": {"loss_type": "sigmoid"}}),
    "beta": ({"beta": 0.5}, {"at_once": 2, "options": {"beta": 0.5}}),
    # trl's sigmoid ignores smoothing. Its aot is the smoothed loss, of sorted log-ratios; one pair
    # at a time, sorting has no effect.
    "smoothing": (
        {"label_smoothing": 0.2},
        {"at_once": 1, "options": {"loss_type": "aot", "label_smoothing": 0.2}},
    ),
    "robust": (
        {"loss": "robust", "label_smoothing": 0.1},
        {"at_once": BATCH, "options": {"loss_type": "robust", "label_smoothing": 0.1}},
    ),
    "hinge": (
        {"loss": "hinge", "beta": 0.5},
        {"at_once": BATCH, "options": {"loss_type": "hinge", "beta": 0.5}},
    ),
    "ipo": ({"loss": "ipo"}, {"at_once": BATCH, "options": {"loss_type": "ipo"}}),
    # trl's mean is over all tokens of a forward pass, ours over those of each answer.
    "sft_weight": (
        {"sft_weight": 0.5},
        {"at_once": 1, "options": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}},
    ),
    "reference": ({"reference": "other"}, {"at_once": BATCH, "reference": "other"}),
    # trl's trainer of dpo always has a reference; that of cpo has the same loss without one.
    "reference-free": (
        {"reference_free": True},
        {"at_once": BATCH, "trainer": "cpo", "options": {"cpo_alpha": 0.0}},
    ),
    "reference-free, smoothing": (
        {"reference_free": True, "label_smoothing": 0.2},
        {"at_once": 2, "trainer": "cpo", "options": {"cpo_alpha": 0.0, "label_smoothing": 0.2}},
    ),
}


@pytest.mark.exhaustive(by=lambda variant: [VARIANTS[variant][1].get("trainer", "dpo")])
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_is_that_of_trl(
    gloo_pool: GlooPool, models: Path, tmp_path: Path, variant: str
) -> None:
    ours, theirs = VARIANTS[variant]
    options = {f"plugins__dpo__{name}": value for name, value in ours.items()}
    if "reference" in ours:
        options["plugins__dpo__reference"] = str(models / ours["reference"])
    run = values(models, tmp_path / "run", train__micro_batch_size=2, **options)
    (ended,) = gloo_pool.run(whole_run, 1, run, timeout=100)
    steps = TrlSteps(models=models, batch=BATCH, **theirs).run(tmp_path / "trl")
    assert_equal_steps(ended.readings, steps)
