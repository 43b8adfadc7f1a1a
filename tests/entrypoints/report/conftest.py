from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.entrypoints.report.browser import Browser, browser


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """One browser for all tests; each opens a page of its own."""
    with browser() as started:
        yield started
