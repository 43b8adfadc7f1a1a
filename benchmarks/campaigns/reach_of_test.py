"""A hash of the code that a test can reach: its modules, the kit, and the plugins that it names."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Final

from ascend_run.types.config import DEFAULT_PLATFORM, DEFAULT_TASK
from scripts.changed_tests import Tree, words
from scripts.import_graph import FOLDERS

from .reach import ROOT, Sources

FIXTURES: Final = "ascend_run/testing/pytest_plugin.py"
ASKS: Final = "discover("
"""In a test that asks which plugins there are."""
DESELECTS: Final = "tests/support/needed_plugins.py"
"""Asks as well, for every test; its outcome is which cases there are."""


def reach_of_test(case: str) -> str:
    """Return the hash for a test of this checkout, by its id."""
    file, _, name = case.partition("::")
    files = start_of(ROOT, file)
    named = frozenset(plugins_of(file, name))
    return _hash(tuple(files), named)


def start_of(root: Path, file: str) -> list[str]:
    """Return the files where a test's imports start: its own, those of its fixtures, and what is
    no Python beside it."""
    folders = [folder for folder in Path(file).parents if folder != Path()]
    fixtures = [str(folder / "conftest.py") for folder in folders]
    return [file, *(one for one in fixtures if (root / one).exists()), FIXTURES]


def plugins_of(file: str, name: str) -> set[str]:
    """Return the plugins that a test can enable: the default ones, that of its folder, and those
    that are words in a string of a test's module. A test that asks which plugins there are can
    enable those of its case's name, or all."""
    sources, tree = _sources(), _tree()
    own = {
        plugin
        for plugin, folder in tree.plugins.items()
        if file.startswith(f"tests/{folder.removeprefix('ascend_run/')}/")
    }
    found = {DEFAULT_PLATFORM, DEFAULT_TASK, *own}
    reached = [one for one in sources.reached((), start_of(ROOT, file)) if one.startswith("tests/")]
    if not any(map(_asks, reached)):
        return found.union(*(_named(one) for one in reached))
    in_name = {plugin for plugin in tree.plugins if re.search(rf"(?<![\w-]){plugin}(?!\w)", name)}
    return found | (in_name or {*tree.plugins})


@functools.cache
def _hash(files: tuple[str, ...], plugins: frozenset[str]) -> str:
    beside = [
        f"{path.name} {path.read_bytes().hex()}"
        for path in sorted((ROOT / files[0]).parent.iterdir())
        if path.is_file() and path.suffix not in (".py", ".pyc")
    ]
    return _sources().hash_from(files, plugins, *beside)


@functools.cache
def _named(file: str) -> set[str]:
    return {
        word for text in _tree().modules[file].strings for word in words(text)
    } & _tree().plugins.keys()


@functools.cache
def _asks(file: str) -> bool:
    return file != DESELECTS and ASKS in (ROOT / file).read_text(encoding="utf-8")


@functools.cache
def _sources() -> Sources:
    return Sources.read(ROOT, FOLDERS)


@functools.cache
def _tree() -> Tree:
    return Tree.read(ROOT)
