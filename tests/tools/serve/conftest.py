from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ascend_run.tools.generate.texts import Texts
from tests.support.browsers import require_browser, started_browser
from tests.support.no_network import no_network as no_network
from tests.tools.report.page import Browser

from .serving import CALL_TEMPLATE, Served, counting, tiny_texts


def pytest_runtest_setup(item: pytest.Item) -> None:
    require_browser(item)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for the tests of a module; each opens a page of its own."""
    with started_browser() as started:
        yield started


@pytest.fixture(scope="package")
def texts() -> Texts:
    return tiny_texts(Path("none"))


@pytest.fixture(scope="package")
def tiny(texts: Texts) -> Iterator[Served]:
    """One server of the stub for all tests that leave nothing behind."""
    with counting(texts) as server:
        yield server


@pytest.fixture(scope="package")
def calling(texts: Texts) -> Iterator[Served]:
    """Likewise, with a template for tools."""
    with counting(texts, template=CALL_TEMPLATE) as server:
        yield server
