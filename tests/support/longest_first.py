"""Runs the longest files first: the tests of a file stay together on a worker, and the other one
would have nothing to do beside a long last file."""

from __future__ import annotations

from typing import Final

import pytest

LONGEST: Final = ("tests/tools/verify/", "tests/entrypoints/test_train_runs.py")
"""Folders and files whose tests take a minute or more."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Otherwise, the order stays."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))
