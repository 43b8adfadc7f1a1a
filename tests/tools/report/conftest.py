from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.browsers import require_browser, started_browser

from .page import Browser


def pytest_runtest_setup(item: pytest.Item) -> None:
    require_browser(item)


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """One browser for all tests here; each opens a page of its own."""
    with started_browser() as started:
        yield started
