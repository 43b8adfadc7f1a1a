"""A browser for the tests of a package; the module of its tests' pages is ``tools.report.page``."""

from __future__ import annotations

import functools
import os
from contextlib import AbstractContextManager

import pytest

from scripts.browser import ADVICE, find
from tests.tools.report.chromium import chromium
from tests.tools.report.firefox import firefox
from tests.tools.report.page import Browser

START = {"chromium": chromium, "firefox": firefox}

found_browser = functools.cache(find)


def require_browser(item: pytest.Item) -> None:
    """Skip what uses the fixture ``browser`` if there is none; where ``CI`` is set, it fails.

    To be called before setup and not in the fixture, which would report a line for each test.
    """
    if "browser" in getattr(item, "fixturenames", ()) and found_browser() is None:
        refuse = pytest.fail if os.environ.get("CI") else pytest.skip
        refuse(f"no browser: {ADVICE}")


def started_browser() -> AbstractContextManager[Browser]:
    """Start the browser; it ends with the context."""
    found = found_browser()
    assert found is not None
    return START[found.engine](found.program)
