"""``@pytest.mark.needs_plugins("gmm", ...)``: a test that only exists if these plugins do.

A plugin may be deleted, and then nothing built-in may refer to it: a test of another plugin that
enables it too is deselected, not skipped. Use it for tests of what two plugins do together; a test
that works with any plugin uses a fake one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import pytest

from ascend_run.registry.discovery import discover

MARKER: Final = "needs_plugins"
NAMED: Final = pytest.StashKey[frozenset[str]]()
"""In the config: the plugins that the collected tests need."""

Case = TypeVar("Case")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that need a plugin without an entry point."""
    there = {*discover()}
    needed = {item: _needed(item) for item in items}
    config.stash[NAMED] = frozenset().union(*needed.values())
    left_out = [item for item in items if not needed[item] <= there]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if needed[item] <= there]


def _needed(item: pytest.Item) -> frozenset[str]:
    return frozenset(name for mark in item.iter_markers(MARKER) for name in mark.args)


def case(plugins: Sequence[str], *rest: Any, id: str | None = None) -> Any:
    """Return a parameter set whose first value is the plugins that it needs."""
    return pytest.param(plugins, *rest, id=id, marks=pytest.mark.needs_plugins(*plugins))


def names_of(table: Mapping[str, Case], plugins: Callable[[Case], Sequence[str]]) -> list[Any]:
    """Return the names of a table's cases as parameters; each needs the plugins of its case."""
    return [
        pytest.param(name, id=name, marks=pytest.mark.needs_plugins(*plugins(found)))
        for name, found in table.items()
    ]
