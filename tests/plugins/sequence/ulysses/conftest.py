"""The plugin that the shared context-parallel suite tests."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def exchange() -> str:
    """Return ours, or the one named by ``ASCEND_RUN_UNDER_TEST``: any replacement must pass."""
    return os.environ.get("ASCEND_RUN_UNDER_TEST", "ulysses")
