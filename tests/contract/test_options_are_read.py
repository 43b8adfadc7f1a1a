"""Every option of our own, of a section or of a plugin, is read by some code; Megatron's fields are
tested in ``tests/prepare/config/test_field_readers.py``."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import attrs
import pytest

import ascend_run
from ascend_run.core.config.rotary_keys import PARAMETERS, PREFIX
from ascend_run.prepare.config.model_keys import ModelKeys
from ascend_run.prepare.config.schema import SECTION_CLASSES
from ascend_run.registry.discovery import discover

PACKAGE: Final = Path(ascend_run.__file__).parent


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def aliases(path: Path, section: str, section_class: str) -> set[str]:
    """Names by which a file speaks of a section: ``x = config.train``, ``x: TrainSection``."""
    arguments, assignments = _named(path)
    return {
        section,
        *(name for name, annotation in arguments if section_class in annotation),
        *(name for name, value in assignments if value.endswith(f".{section}")),
    }


@functools.cache
def _named(path: Path) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Each argument of a file with its annotation, and each name with what it is given."""
    arguments, assignments = [], []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.arg) and node.annotation is not None:
            arguments.append((node.arg, ast.unparse(node.annotation)))
        elif isinstance(node, ast.Assign):
            assignments += [
                (ast.unparse(name), ast.unparse(value))
                for target in node.targets
                for name, value in _assigned(target, node.value)
            ]
    return arguments, assignments


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Each name of an assignment with what it is given."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        yield from zip(target.elts, value.elts, strict=False)
    else:
        yield target, value


@functools.cache
def attributes_read(path: Path) -> frozenset[tuple[str, str]]:
    """What each attribute that a file reads is read of, and its name."""
    return frozenset(
        (ast.unparse(node.value).rpartition(".")[2], node.attr)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    )


@pytest.mark.parametrize(
    ("section", "section_class"), [*SECTION_CLASSES.items(), ("model", ModelKeys)], ids=str
)
def test_each_option_of_a_section_is_read(section: str, section_class: type) -> None:
    read: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        names = aliases(path, section, section_class.__name__)
        read |= {attribute for base, attribute in attributes_read(path) if base in names}
    if section_class is ModelKeys:  # read by their names from this table
        read |= {PREFIX + name for names in PARAMETERS.values() for name in names}
    options = {attribute.name for attribute in attrs.fields(section_class)}
    assert options - read == set()


def is_options(base: str) -> bool:
    return base.rpartition(".")[2].lstrip("_") in ("config", "options")


def options_of_plugins() -> Iterator[Any]:
    catalogue = discover()
    ours = [name for name, candidate in catalogue.items() if candidate.first_party]
    for name, plugin in catalogue.load(ours).items():
        if getattr(plugin, "config_class", None) is not None and name == plugin.manifest.name:
            yield pytest.param(plugin, id=name)


@pytest.mark.parametrize("plugin", [*options_of_plugins()])
def test_each_option_of_a_plugin_is_read(plugin: Any) -> None:
    """By a module beside the plugin, or beside a class that it inherits options from, or by the
    module of its group: from an object that is named as options are, or from ``self`` where the
    options are defined."""
    own = {inspect.getfile(c) for c in plugin.config_class.__mro__ if attrs.has(c)}
    folders = {Path(file).parent for file in {inspect.getfile(plugin), *own}}
    group = Path(inspect.getfile(plugin)).parents[1] / "__init__.py"
    read = {
        attribute
        for path in {group, *(path for folder in folders for path in folder.rglob("*.py"))}
        for base, attribute in attributes_read(path)
        if is_options(base) or (base == "self" and str(path) in own)
    }
    assert {attribute.name for attribute in attrs.fields(plugin.config_class)} - read == set()
