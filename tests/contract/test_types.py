"""What the code says of its own types: all of it is checked, and the named things have one."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("def run(mask: Any): ...", "mask"),
        ("def run(*, group: object = None): ...", "group"),
        ("def run(attention_mask: Any | None): ...", "attention_mask"),
        ("def run(groups: tuple[Any, ...]): ...", "groups"),
        ("def run(configs: list[Any]): ...", "configs"),
        ("spec: Any | None = None", "spec"),
        ("self.tp_ranks: None | tuple[int, object] = None", "tp_ranks"),
        ("Saved = Any", "Saved"),
        ("Saved: TypeAlias = Any", "Saved"),
        ("Saved: TypeAlias = tuple[Any, ...] | None", "Saved"),
    ],
)
def test_what_is_annotated_as_any_is_found(source: str, name: str) -> None:
    assert [*_untyped(ast.parse(source))] == [(1, name)]


@pytest.mark.parametrize(
    "source",
    [
        "def run(mask: Tensor | None, masked: Any): ...",
        "groups: Mapping[str, Any] = {}",
        "Fields: TypeAlias = Mapping[str, Any]",
    ],
)
def test_what_has_a_type_is_not_found(source: str) -> None:
    assert [*_untyped(ast.parse(source))] == []


def _untyped(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of what is annotated as Any, alone or in a union or tuple, and of an alias."""
    for node in ast.walk(tree):
        match node:
            case ast.arg(arg=name, annotation=ast.expr() as annotation):
                if _NAMED.search(name) and _is_any(annotation):
                    yield node.lineno, name
            case ast.AnnAssign(target=ast.Name(name), annotation=ast.Name("TypeAlias")):
                if node.value is not None and _is_any(node.value):
                    yield node.lineno, name
            case ast.AnnAssign(target=target, annotation=annotation):
                name = ast.unparse(target).rpartition(".")[2]
                if _NAMED.search(name) and _is_any(annotation):
                    yield node.lineno, name
            case ast.Assign(targets=[ast.Name(name)], value=ast.Name("Any")):
                yield node.lineno, name


def _is_any(annotation: ast.expr) -> bool:
    match annotation:
        case ast.Name("Any" | "object"):
            return True
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _is_any(left) or _is_any(right)
        case ast.Subscript(value=ast.Name("tuple" | "list"), slice=ast.Tuple(elts=parts)):
            return any(map(_is_any, parts))
        case ast.Subscript(value=ast.Name("tuple" | "list"), slice=part):
            return _is_any(part)
    return False
