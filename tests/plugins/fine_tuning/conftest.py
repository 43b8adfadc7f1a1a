"""Fixtures of the suites of adapters; Megatron, imported before a test module asks for it."""

from __future__ import annotations

import pytest

from ascend_run.testing.pool import GlooPool
from tests.support.quiet_imports import import_quietly

from .adapter_trials import Trials

import_quietly("megatron.core.models.gpt")


@pytest.fixture(scope="module")
def trials(gloo_pool: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> Trials:
    return Trials(gloo_pool, tmp_path_factory.mktemp("adapters"))
