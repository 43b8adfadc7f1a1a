from __future__ import annotations

import functools
import os
from collections.abc import Iterator

import pytest

from scripts.browser import ADVICE, find

from .chromium import chromium
from .firefox import firefox
from .page import Browser

START = {"chromium": chromium, "firefox": firefox}

found_browser = functools.cache(find)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Without a browser, what needs one is skipped; where ``CI`` is set, it fails.

    Here and not in the fixture, which would report a line for each test that uses it.
    """
    if "browser" in getattr(item, "fixturenames", ()) and found_browser() is None:
        refuse = pytest.fail if os.environ.get("CI") else pytest.skip
        refuse(f"no browser: {ADVICE}")


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """One browser for all tests here; each opens a page of its own."""
    found = found_browser()
    assert found is not None
    with START[found.engine](found.program) as started:
        yield started
