"""Fixtures of the suites of tasks; imports Megatron's datasets before the first test module."""

from __future__ import annotations

import warnings

import pytest

from ascend_run.testing.pool import GlooPool
from ascend_run.tools.verify.ranks import PoolRanks
from ascend_run.tools.verify.verifier import Verifier

# Megatron and its dependencies warn of deprecations and missing packages when first imported.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.datasets.gpt_dataset  # noqa: F401


@pytest.fixture(scope="module")
def verify(gloo_pool: GlooPool) -> Verifier:
    return Verifier(PoolRanks(gloo_pool))
