"""Which plugin the suite of sequence exchanges is run against."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def exchange() -> str:
    """Ours, or the one named by ``ASCEND_RUN_UNDER_TEST``: whatever replaces it must pass."""
    return os.environ.get("ASCEND_RUN_UNDER_TEST", "ulysses")
