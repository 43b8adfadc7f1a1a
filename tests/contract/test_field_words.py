"""Names of tests and words of prose that the next change could spoil."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.field_words import PATHS, files, findings, read_table

ROOT = Path(__file__).parent.parent.parent
LONGEST_NAME = 69


def too_long(source: str) -> Iterator[str]:
    """The names of test functions above the limit."""
    for node in ast.walk(ast.parse(source)):
        is_test = isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        if is_test and len(node.name) > LONGEST_NAME:
            yield node.name


def test_names_of_tests_are_short() -> None:
    """``test_<what>_<condition>``; a sentence belongs in the docstring."""
    names = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / "tests").rglob("*.py")
        for name in too_long(path.read_text(encoding="utf-8"))
    }
    assert sorted(names) == []


@pytest.mark.parametrize(("length", "found"), [(69, 0), (70, 1)])
def test_a_name_has_at_most_69_characters(length: int, found: int) -> None:
    name = "test_".ljust(length, "a")
    assert len([*too_long(f"class Test:\n    def {name}(self): ...")]) == found


def test_prose_uses_the_fields_words() -> None:
    table = read_table()
    paths = [*files([ROOT / name for name in PATHS])]
    assert len(paths) > 100
    assert [str(finding) for path in paths for finding in findings(path, table)] == []
