"""The gradient of every parameter in each variant against trl, and where trl has none against the
formula of transformers' logits, in float64; of pairs in rows of their own and packed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from ascend_run.testing.pool import GlooPool
from tests.support.pair_gradients import (
    PAIRS,
    TrlGradients,
    assert_gradients_are_those_of,
    plain_gradients,
)
from tests.support.preference_files import write_models_and_pairs

from .test_against_trl import VARIANTS
from .test_training import sigmoid, values


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models_and_pairs(tmp_path_factory.mktemp("simpo"), PAIRS)


@pytest.mark.exhaustive(by=lambda variant, packing: [packing])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_gradient_is_that_of_trl(
    gloo_pool: GlooPool, models: Path, tmp_path: Path, variant: str, packing: bool
) -> None:
    ours, theirs, at_once = VARIANTS[variant]
    trl = TrlGradients(models=models, batch=PAIRS, trainer="cpo", options=theirs, at_once=at_once)
    options = {f"plugins__simpo__{name}": value for name, value in ours.items()}
    run = partial(values, models, tmp_path / "run", plugins__simpo__packing=packing, **options)
    assert_gradients_are_those_of(gloo_pool, trl.model(tmp_path / "trl"), tmp_path, run, packing)


def hinge(chosen: Tensor, rejected: Tensor) -> Tensor:
    return (1 - 2.0 * (chosen - rejected - 0.5)).clamp(min=0)


def ipo(chosen: Tensor, rejected: Tensor) -> Tensor:
    return (chosen - rejected - 0.5 - 1 / (2 * 1.0)) ** 2


HINGE = {"loss": "hinge", "beta": 2.0, "gamma_beta_ratio": 0.5}
FORMULAS: dict[str, tuple[dict[str, Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "sigmoid, sft_weight": ({"sft_weight": 0.5}, sigmoid),
    "hinge": (HINGE, hinge),
    "hinge, sft_weight": ({**HINGE, "sft_weight": 0.25}, hinge),
    "ipo, margin": ({"loss": "ipo", "beta": 1.0, "gamma_beta_ratio": 0.5}, ipo),
}


@pytest.mark.exhaustive(by=lambda formula, packing: [packing])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("formula", FORMULAS)
def test_each_gradient_is_that_of_the_formula(
    gloo_pool: GlooPool, models: Path, tmp_path: Path, formula: str, packing: bool
) -> None:
    ours, loss = FORMULAS[formula]
    model = plain_gradients(models, loss, sft_weight=ours.get("sft_weight", 0.0))
    options = {f"plugins__simpo__{name}": value for name, value in ours.items()}
    run = partial(values, models, tmp_path / "run", plugins__simpo__packing=packing, **options)
    assert_gradients_are_those_of(gloo_pool, model, tmp_path, run, packing)
