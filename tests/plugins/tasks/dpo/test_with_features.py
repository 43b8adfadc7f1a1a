"""Each feature beside the task and its reference: the steps are those without it, packed or not;
and packed rows are their records alone, with what makes another model, and in each family."""

from __future__ import annotations

from collections.abc import Hashable

import pytest

from ascend_run.testing.pool import GlooPool
from tests.support.feature_cases import (
    COMPARED,
    PLAIN,
    assert_leaves_the_steps,
    assert_packed_is_alone,
    cases,
    models,
)
from tests.support.feature_steps import LAYOUTS, Steps, feature_steps

ALONE = ("one rank", "tp=2", "vpp=2", "cp=2", "ep=2")
"""Packed pairs are run in every layout; a row of one pair is what other tasks have too."""


def aspects(name: str, where: str, packing: bool) -> list[Hashable]:
    """Return what a case of the sample shows: that rows are packed or not, and the axes; tensors
    that are split take seconds."""
    layout = LAYOUTS[where][1]
    return [packing, *layout] if name == "recompute" and "tp" not in layout else []


@pytest.fixture(scope="module")
def steps(gloo_pool: GlooPool) -> Steps:
    return feature_steps(gloo_pool, "dpo")


@pytest.mark.exhaustive(by=aspects)
@pytest.mark.parametrize(
    ("name", "where", "packing"), cases(COMPARED, {True: [*LAYOUTS], False: ALONE})
)
def test_a_feature_leaves_the_steps_as_they_are(
    steps: Steps, name: str, where: str, packing: bool
) -> None:
    assert_leaves_the_steps(steps, name, where, packing)


@pytest.mark.exhaustive(by=lambda name, where: [where] if (name, where) == (PLAIN, "cp=2") else [])
@pytest.mark.parametrize(("name", "where"), models([*LAYOUTS]))
def test_packed_rows_are_their_records_alone(steps: Steps, name: str, where: str) -> None:
    assert_packed_is_alone(steps, name, where)
