"""The functions of the runtime that call each hook, found in its sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ascend_run.plugin_api.hookspecs import hook_points

LAYERS: Final = ("core", "prepare", "tools/plan")
"""Folders that call hooks in a run. Other tools and the kit call them as a run does."""


def callers(package: Path) -> dict[str, list[str]]:
    """Return hook -> its callers, as ``core.run.prepared_rank``, in the order of the sources."""
    found: dict[str, list[str]] = {name: [] for name in hook_points()}
    for layer in LAYERS:
        for path in sorted((package / layer).rglob("*.py")):
            module = ".".join(path.relative_to(package).with_suffix("").parts)
            for function, hook in _named(ast.parse(path.read_text(encoding="utf-8")), module):
                if hook in found and function not in found[hook]:
                    found[hook].append(function)
    return found


def _named(node: ast.AST, inside: str) -> Iterator[tuple[str, str]]:
    """Yield (function, string) for every string in a function or class."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _named(child, f"{inside}.{child.name}")
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield inside, child.value
        else:
            yield from _named(child, inside)
