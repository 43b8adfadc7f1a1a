from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.entrypoints.report.browser import Browser, browser


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    """One browser for all tests here; each opens a page of its own."""
    with browser() as started:
        yield started
