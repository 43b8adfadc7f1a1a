"""Each feature beside the task and its head: the steps are those without it."""

from __future__ import annotations

import pytest

from ascend_run.testing.pool import GlooPool
from benchmarks.campaigns.features import EXCHANGE
from tests.support.feature_steps import (
    COMPARED,
    LAYOUTS,
    Steps,
    assert_leaves_the_steps,
    feature_steps,
)
from tests.support.needed_plugins import names_of


@pytest.fixture(scope="module")
def steps(gloo_pool: GlooPool) -> Steps:
    return feature_steps(gloo_pool, "orm")


@pytest.mark.exhaustive(by=lambda name, where: [where])
@pytest.mark.parametrize(
    "where", names_of(LAYOUTS, lambda run: [EXCHANGE] if "cp" in run[1] else [])
)
@pytest.mark.parametrize("name", COMPARED)
def test_a_feature_leaves_the_steps_as_they_are(steps: Steps, name: str, where: str) -> None:
    assert_leaves_the_steps(steps, name, where)
