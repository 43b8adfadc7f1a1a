"""Each feature beside the task and its head: the steps are those without it, packed or not; and
packed rows are their records alone, with what makes another model, and in each family."""

from __future__ import annotations

from typing import Final

import pytest

from ascend_run.testing.pool import GlooPool
from tests.support.feature_cases import (
    COMPARED,
    COVERING,
    assert_leaves_the_steps,
    assert_packed_is_alone,
    cases,
    models,
    shown_case,
    shown_model,
)
from tests.support.feature_steps import Steps, feature_steps

BESIDE: Final = [name for name in COMPARED if name != "eval-generate"]
"""That one writes texts, which a model with a score head cannot; its own suite shows that."""


@pytest.fixture(scope="module")
def steps(gloo_pool: GlooPool) -> Steps:
    return feature_steps(gloo_pool, "orm")


@pytest.mark.exhaustive(by=shown_case)
@pytest.mark.parametrize(
    ("name", "where", "packing"), cases(BESIDE, {True: COVERING, False: COVERING})
)
def test_a_feature_leaves_the_steps_as_they_are(
    steps: Steps, name: str, where: str, packing: bool
) -> None:
    assert_leaves_the_steps(steps, name, where, packing)


@pytest.mark.exhaustive(by=shown_model)
@pytest.mark.parametrize(("name", "where"), models(COVERING))
def test_packed_rows_are_their_records_alone(steps: Steps, name: str, where: str) -> None:
    assert_packed_is_alone(steps, name, where)
