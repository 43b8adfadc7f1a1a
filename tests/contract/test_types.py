"""What the code says of its own types: all of it is checked, and the named things have one."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

_NAMED = re.compile(r"(^|_)(spec|mask|group|config|layout|ops|rank)s?$")
"""Parameters and fields that are never ``Any`` or ``object``."""


def test_mypy_checks_the_whole_package_strictly() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    relaxed = {
        row["module"]: {name: given for name, given in row.items() if name != "module"}
        for row in settings["overrides"]
        if "ascend_run" in str(row["module"])
    }

    assert settings["strict"] is True
    assert settings["packages"] == ["ascend_run"]
    assert "exclude" not in settings
    assert relaxed == {"ascend_run.plugin_api.hookspecs": {"disable_error_code": ["empty-body"]}}


def test_what_has_a_type_of_its_own_is_never_any() -> None:
    trees = {
        path.relative_to(ROOT): ast.parse(path.read_text())
        for path in sorted((ROOT / "ascend_run").rglob("*.py"))
    }
    found = [f"{path}:{line} {name}" for path in trees for line, name in _untyped(trees[path])]

    assert len(trees) > 500
    assert found == []


def _untyped(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of what is annotated as Any, and of an alias of it."""
    for node in ast.walk(tree):
        match node:
            case ast.arg(arg=name, annotation=ast.Name("Any" | "object")) if _NAMED.search(name):
                yield node.lineno, name
            case ast.AnnAssign(target=target, annotation=ast.Name("Any" | "object")):
                name = ast.unparse(target).rpartition(".")[2]
                if _NAMED.search(name):
                    yield node.lineno, name
            case ast.Assign(targets=[ast.Name(name)], value=ast.Name("Any")):
                yield node.lineno, name
