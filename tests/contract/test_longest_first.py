"""The order of the files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.longest_first import LONGEST, pytest_collection_modifyitems

ROOT = Path(__file__).parents[2]


def test_the_longest_files_come_first_and_all_others_stay_in_order() -> None:
    names = ["tests/a.py::test_b", "tests/a.py::test_a", *LONGEST, "tests/c.py::test_a"]
    items: Any = [SimpleNamespace(nodeid=name) for name in names]
    pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == [*LONGEST, *(n for n in names if n not in LONGEST)]


@pytest.mark.parametrize("name", LONGEST)
def test_each_of_them_is_there(name: str) -> None:
    assert (ROOT / name).exists()


def test_a_session_has_them_first(request: pytest.FixtureRequest) -> None:
    found = [item.nodeid.startswith(LONGEST) for item in request.session.items]
    assert found == sorted(found, reverse=True)
