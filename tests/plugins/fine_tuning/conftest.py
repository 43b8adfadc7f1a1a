"""Fixtures of the suites of adapters; Megatron, imported before a test module asks for it."""

from __future__ import annotations

import warnings

import pytest

from ascend_run.testing.pool import GlooPool

from .adapter_trials import Trials

# Megatron and what it imports warn of what they deprecate or miss, once, when first imported.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.models.gpt  # noqa: F401


@pytest.fixture(scope="module")
def trials(gloo_pool: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> Trials:
    return Trials(gloo_pool, tmp_path_factory.mktemp("adapters"))
