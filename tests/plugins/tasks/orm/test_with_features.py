"""Each feature beside the task and its head: the steps are those without it."""

from __future__ import annotations

import pytest

from ascend_run.testing.pool import GlooPool
from tests.support.feature_steps import (
    COMPARED,
    WHERE,
    Steps,
    assert_leaves_the_steps,
    feature_steps,
)


@pytest.fixture(scope="module")
def steps(gloo_pool: GlooPool) -> Steps:
    return feature_steps(gloo_pool, "orm")


@pytest.mark.exhaustive(by=lambda name, where: [where])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", COMPARED)
def test_a_feature_leaves_the_steps_as_they_are(steps: Steps, name: str, where: str) -> None:
    assert_leaves_the_steps(steps, name, where)
