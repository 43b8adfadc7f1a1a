"""Fixtures of the suites of tasks; imports Megatron's datasets before the first test module."""

from __future__ import annotations

import pytest

from ascend_run.testing.pool import GlooPool
from ascend_run.tools.verify.ranks import PoolRanks
from ascend_run.tools.verify.verifier import Verifier
from tests.support.quiet_imports import import_quietly

import_quietly("megatron.core.datasets.gpt_dataset")


@pytest.fixture(scope="module")
def verify(gloo_pool: GlooPool) -> Verifier:
    return Verifier(PoolRanks(gloo_pool))
