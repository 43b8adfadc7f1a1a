"""Parse the Python files of a checkout: imports and strings of each. Imports none of them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import attrs

FOLDERS: Final = ("ascend_run", "tests", "benchmarks", "scripts", "examples")


@attrs.frozen
class Module:
    """One Python file."""

    imports: frozenset[str]
    """Dotted names of imported modules and of names imported from them, which may be modules."""
    strings: frozenset[str]
    num_lines: int


def read_modules(root: Path, folders: Iterable[str] = FOLDERS) -> dict[str, Module]:
    """Return path relative to the root -> module."""
    files = {
        str(path.relative_to(root)): path.read_text(encoding="utf-8")
        for folder in folders
        for path in sorted((root / folder).rglob("*.py"))
    }
    return {file: _module(file, text) for file, text in files.items()}


def imported_files(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """Return file -> the files of the same tree that it imports."""
    files = {dotted(file): file for file in modules}
    return {
        file: {files[name] for name in module.imports & files.keys()} - {file}
        for file, module in modules.items()
    }


def dotted(file: str) -> str:
    """Return the dotted module name of a file."""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _module(file: str, text: str) -> Module:
    nodes = [*ast.walk(ast.parse(text, file))]
    constants = (node.value for node in nodes if isinstance(node, ast.Constant))
    return Module(
        imports=frozenset(_imports(file, nodes)),
        strings=frozenset(value for value in constants if isinstance(value, str)),
        num_lines=len(text.splitlines()),
    )


def _imports(file: str, nodes: Iterable[ast.AST]) -> Iterator[str]:
    package = dotted(file).split(".")
    if not file.endswith("__init__.py"):
        package.pop()
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
