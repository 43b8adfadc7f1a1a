"""Documentation of a plugin's options, read from its source."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs


@attrs.frozen
class OptionDoc:
    """One field of a plugin's options."""

    name: str
    type: str
    default: str
    """As a Python expression; ``required`` if there is none."""
    help: str
    """The docstring below the field, on one line."""


def option_docs(options: type | None) -> list[OptionDoc]:
    """Return the documentation of every field of an attrs class; empty if ``options`` is None."""
    if options is None:
        return []
    help_of = dict(_field_documentation(options))
    return [
        OptionDoc(field.name, _type_name(field), _default(field), help_of.get(field.name, ""))
        for field in attrs.fields(options)
    ]


def _field_documentation(options: type) -> Iterator[tuple[str, str]]:
    """(field, docstring), inherited fields first."""
    for base in reversed(options.__mro__):
        path = getattr(sys.modules.get(base.__module__), "__file__", None)
        if attrs.has(base) and path is not None:
            yield from _documented(Path(path).read_text(encoding="utf-8"), base.__name__)


def _documented(source: str, class_name: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            for field, below in zip(node.body, node.body[1:], strict=False):
                text = _text(below)
                if isinstance(field, ast.AnnAssign) and text is not None:
                    yield ast.unparse(field.target), " ".join(text.split())


def _text(node: ast.stmt) -> str | None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return node.value.value if isinstance(node.value.value, str) else None
    return None


def _type_name(field: attrs.Attribute[Any]) -> str:
    return field.type if isinstance(field.type, str) else inspect.formatannotation(field.type)


def _default(field: attrs.Attribute[Any]) -> str:
    default: Any = field.default
    if default is attrs.NOTHING:
        return "required"
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        return "computed" if default.takes_self else repr(default.factory())
    return repr(default)
