"""The kernel and the core stay small, and so does every module and every function."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import ascend_run

PACKAGE = Path(ascend_run.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
CATALOGUE = PACKAGE / "plugin_api/hookspecs.py"
"""One specification for each hook, so it grows with their number."""


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def long_functions(source: str, most: int) -> Iterator[str]:
    """Yield the names of functions of more than ``most`` lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            if node.end_lineno - node.lineno + 1 > most:
                yield node.name


@pytest.mark.parametrize(
    ("folders", "most"),
    [
        (("types", "plugin_api", "registry"), 4500),
        (("core",), 13_000),
        (("prepare",), 4350),
        (("launch",), 850),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else None,
)
def test_layers_stay_small(folders: tuple[str, ...], most: int) -> None:
    paths = [path for path in MODULES if path.relative_to(PACKAGE).parts[0] in folders]
    assert 0 < sum(map(num_lines, paths)) < most


def test_modules_have_at_most_300_lines() -> None:
    assert [path for path in MODULES if num_lines(path) > 300] == [CATALOGUE]


def test_functions_have_at_most_60_lines() -> None:
    found = {path: [*long_functions(path.read_text(encoding="utf-8"), 60)] for path in MODULES}
    assert {path: names for path, names in found.items() if names} == {}


def test_a_long_function_is_found() -> None:
    source = "class A:\n    def short(self): ...\n    def long(self):\n        1\n        2\n"
    assert [*long_functions(source, 2)] == ["long"]
