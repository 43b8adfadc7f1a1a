"""Every option of our own, of a section or of a plugin, is read by some code; Megatron's fields are
tested in ``tests/prepare/config/test_field_readers.py``."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Collection, Iterator
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


def definitions(path: Path, kind: type[ast.AST] | tuple[type[ast.AST], ...]) -> Iterator[Any]:
    return (node for node in ast.walk(tree(path)) if isinstance(node, kind))


def read_in(node: ast.AST, is_base: Callable[[str], bool]) -> set[str]:
    """Attributes that a part of a file reads of what these names stand for."""
    return {
        found.attr
        for found in ast.walk(node)
        if isinstance(found, ast.Attribute)
        and isinstance(found.ctx, ast.Load)
        and is_base(ast.unparse(found.value))
    }


def read_by_class(of_class: type, is_base: Callable[[str], bool]) -> set[str]:
    path = Path(inspect.getfile(of_class))
    named = (node for node in definitions(path, ast.ClassDef) if node.name == of_class.__name__)
    return {name for node in named for name in read_in(node, is_base)}


def read_of_arguments(path: Path, classes: Collection[str]) -> set[str]:
    """Attributes that functions read of arguments that have one of these classes."""
    read: set[str] = set()
    for node in definitions(path, ast.FunctionDef):
        arguments = {
            each.arg
            for each in (*node.args.args, *node.args.kwonlyargs)
            if each.annotation is not None and ast.unparse(each.annotation) in classes
        }
        read |= read_in(node, arguments.__contains__)
    return read


def options_read(plugin: Any) -> set[str]:
    """Options that are read by a module beside the plugin, of what is named as options are; by a
    class that it inherits from, likewise; by its options themselves; or elsewhere by a function
    with an argument of the class that defines them."""
    folder = Path(inspect.getfile(plugin)).parent
    ours = [c for c in plugin.__mro__ if c.__module__.startswith("ascend_run.")]
    defining = [c for c in plugin.config_class.__mro__ if attrs.has(c)]
    read = {name for path in folder.rglob("*.py") for name in read_in(tree(path), is_options)}
    read = read.union(*(read_by_class(each, is_options) for each in ours))
    read = read.union(*(read_by_class(each, "self".__eq__) for each in defining))
    shared = {path for room in ("text", "ops") for path in (PACKAGE / room).rglob("*.py")}
    shared |= {*folder.parent.glob("*.py"), *(folder.parent / "shared").glob("*.py")}
    names = {each.__name__ for each in defining}
    return read.union(*(read_of_arguments(path, names) for path in shared))


@pytest.mark.parametrize("plugin", [*options_of_plugins()])
def test_each_option_of_a_plugin_is_read(plugin: Any) -> None:
    options = {attribute.name for attribute in attrs.fields(plugin.config_class)}
    assert options - options_read(plugin) == set()


def test_an_option_that_only_another_task_reads_is_found() -> None:
    """``too_long`` and ``beta`` of pairs are read, but not for a task with other options."""
    from ascend_run.plugins.tasks.pretrain import Pretrain

    assert {"too_long", "packing", "beta", "sft_weight"} & options_read(Pretrain) == set()
