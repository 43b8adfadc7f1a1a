"""A hash of the code that a trial of the kit can reach: if it is unchanged, so is the outcome.

It covers the modules that any trial can import, those of the trial's plugins, and the versions of
Python, torch and Megatron. Imports are followed, also those within functions, and so are names of
modules in strings. Docstrings, comments and formatting do not count.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final

import attrs

from ascend_run.testing.models import MODELS
from ascend_run.types.config import DEFAULT_PLATFORM, DEFAULT_TASK
from scripts.changed_tests import Tree, is_in_plugin

from .campaign import FOLDER

ROOT: Final = FOLDER.parents[1]
EVERY_TRIAL: Final = ("kit", "parity", "pool", "worker")
"""Modules of ``ascend_run.testing`` where a comparison starts."""
PACKAGES: Final = ("torch", "megatron-core")


def reach_of_trial(
    plugins: Iterable[str], model: str, *more: str, files: Iterable[str] = ()
) -> str:
    """Return the hash for a trial of this checkout.

    Args:
        plugins: Features, and others than the default plugins of any kind.
        model: A key of ``testing.models.MODELS``.
        more: What else the outcome depends on, such as options.
        files: Where the trial starts, besides the kit's comparison.
    """
    family = str(MODELS[model]["model.family"])
    named = (*plugins, family, DEFAULT_PLATFORM, DEFAULT_TASK)
    return _sources().hash_from(files, named, *more)


@attrs.frozen
class Sources:
    """The package of a checkout."""

    root: Path
    plugins: Mapping[str, str]
    """Name -> folder, or the module's path without ``.py``."""
    used: Mapping[str, Iterable[str]]
    """File -> files that its import or a call in it may import."""
    _digests: dict[str, str] = attrs.field(factory=dict)

    @classmethod
    def read(cls, root: Path, folders: Sequence[str] = ("ascend_run",)) -> Sources:
        """Parse folders of the tree; import nothing."""
        tree = Tree.read(root, folders)
        used = {
            file: {*targets, *_packages_of(file, tree.modules)}
            for file, targets in tree.used().items()
        }
        return cls(root, tree.plugins, used)

    def hash(self, plugins: Iterable[str], *more: str) -> str:
        """Return 16 hexadecimal digits for a trial with these plugins of any kind."""
        return self.hash_from((), plugins, *more)

    def hash_from(self, files: Iterable[str], plugins: Iterable[str], *more: str) -> str:
        """Return the same for a trial that starts in these files."""
        folders = [self.plugins[name] for name in sorted({*plugins})]
        reached = self.reached(folders, files)
        beside = [
            str(path.relative_to(self.root))
            for folder in folders
            for path in (self.root / folder).rglob("*")
            if path.is_file() and path.suffix not in (".py", ".pyc")
        ]
        lines = [f"{file} {self._digest(file)}" for file in sorted({*reached, *beside})]
        return _hashed("\n".join([*lines, *_versions(), *more]).encode())[:16]

    def reached(self, folders: Iterable[str], files: Iterable[str] = ()) -> set[str]:
        """Return the files that a trial with the plugins in these folders can import, if it starts
        in these files."""
        plugins = [*folders]
        waiting = [*files]
        waiting += [file for file in self.used if any(is_in_plugin(file, one) for one in plugins)]
        waiting += [f"ascend_run/testing/{module}.py" for module in EVERY_TRIAL]
        reached: set[str] = set()
        while waiting:
            file = waiting.pop()
            if file not in reached:
                reached.add(file)
                waiting += self.used[file]
        return reached

    def _digest(self, file: str) -> str:
        if file not in self._digests:
            data = (self.root / file).read_bytes()
            self._digests[file] = _hashed(_code(data) if file.endswith(".py") else data)
        return self._digests[file]


@functools.cache
def _sources() -> Sources:
    return Sources.read(ROOT)


@functools.cache
def _versions() -> tuple[str, ...]:
    python = f"python {sys.version_info.major}.{sys.version_info.minor}"
    return (python, *(f"{package} {version(package)}" for package in PACKAGES))


def _packages_of(file: str, files: Iterable[str]) -> set[str]:
    """The packages that a module is in, which are imported before it."""
    parents = [f"{parent}/__init__.py" for parent in Path(file).parents]
    return {parent for parent in parents if parent in files and parent != file}


def _code(source: bytes) -> bytes:
    """A text that differs if the code does: the syntax tree without strings as statements."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [statement for statement in body if not _is_text(statement)]  # type: ignore[attr-defined]
    return ast.dump(tree).encode()


def _is_text(statement: ast.AST) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _hashed(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
