import pytest

from tests.support import exhaustive, longest_first, needed_plugins
from tests.support.exhaustive import pytest_addoption, pytest_report_collectionfinish
from tests.support.lacking import pytest_pyfunc_call
from tests.support.session import (
    pytest_collection,
    pytest_configure,
    pytest_fixture_setup,
    pytest_runtest_protocol,
)

__all__ = [
    "pytest_addoption",
    "pytest_collection",
    "pytest_configure",
    "pytest_fixture_setup",
    "pytest_pyfunc_call",
    "pytest_report_collectionfinish",
    "pytest_runtest_protocol",
]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    needed_plugins.pytest_collection_modifyitems(config, items)
    exhaustive.pytest_collection_modifyitems(config, items)
    longest_first.pytest_collection_modifyitems(items)
