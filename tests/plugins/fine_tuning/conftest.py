"""Fixtures of the suites of adapters."""

from __future__ import annotations

import pytest

from ascend_run.testing.pool import GlooPool

from .adapter_trials import Trials


@pytest.fixture(scope="module")
def trials(gloo_pool: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> Trials:
    return Trials(gloo_pool, tmp_path_factory.mktemp("adapters"))
