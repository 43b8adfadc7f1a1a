"""Replace third-party functions during a run: check, apply and undo patches.

This is the only module that does so. It rejects patches that do not match the installed packages.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import platform
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import attrs
from packaging.specifiers import SpecifierSet

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api.contracts import Patch
from ascend_run.plugin_api.errors import PlatformError

_ABSENT: Final = object()


def source_hash(target: object) -> str | None:
    """Return the first 16 hex digits of the SHA-256 of an object's Python source.

    Args:
        target: A function, property or class.

    Returns:
        The hash, or None if there is no Python source.
    """
    code: Any = target.fget if isinstance(target, property) else target
    has_source = inspect.isroutine(code) or inspect.isclass(code)
    return _hash_of(code) if has_source else None


@functools.cache  # reading and tokenizing the source takes milliseconds
def _hash_of(code: Any) -> str | None:
    try:
        return hashlib.sha256(inspect.getsource(code).encode()).hexdigest()[:16]
    except (OSError, TypeError):  # compiled or built-in
        return None


def collect_patches(hooks: Hooks) -> list[tuple[str, Patch]]:
    """Return (plugin, patch) of every enabled plugin.

    Raises:
        PlatformError: Two patches have the same target.
    """
    owner: dict[str, str] = {}
    found, problems = [], []
    for plugin, patches in hooks.contributions("ascend_patches"):
        for patch in patches:
            if patch.target in owner:
                problems.append(
                    f"'{owner[patch.target]}' and '{plugin}' both patch {patch.target}; enable one "
                    "of them"
                )
            owner[patch.target] = plugin
            if patch.wraps:
                replace = hooks.naming("ascend_patches", plugin).around(patch.replacement)
                patch = attrs.evolve(patch, replacement=replace)
            found.append((plugin, patch))
    if problems:
        raise PlatformError("patches collide", problems)
    return found


@contextmanager
def applied_patches(hooks: Hooks) -> Iterator[None]:
    """Apply the patches of all enabled plugins and restore the original objects on exit.

    Raises:
        PlatformError: Two patches have the same target, or one does not match the installed
            package.
    """
    with applied(collect_patches(hooks)):
        yield


@contextmanager
def applied(patches: Sequence[tuple[str, Patch]]) -> Iterator[None]:
    """Apply all patches or none, and undo them in reverse order on exit.

    All modules are imported before the first patch is applied: a module imported in between would
    bind the replacements permanently.

    Args:
        patches: Tuples (plugin, patch).

    Raises:
        PlatformError: The installed version or source differs from the one that a patch was made
            for, or a target is missing.
    """
    targets = [_Target.of(patch) for _, patch in patches]
    releases = _releases({patch.package for _, patch in patches})
    problems = [
        f"'{plugin}': {problem}"
        for (plugin, patch), target in zip(patches, targets, strict=True)
        if (problem := _problem(patch, target, *releases[patch.package]))
    ]
    if problems:
        raise PlatformError("patches do not match the installed packages", problems)
    with ExitStack() as undo:
        undo.callback(_clear_torch_function_table)
        for (_, patch), target in zip(patches, targets, strict=True):
            before = vars(target.owner).get(target.name, _ABSENT)
            new = patch.replacement(target.value) if patch.wraps else patch.replacement
            setattr(target.owner, target.name, new)
            undo.callback(_restore, target, before)
        _clear_torch_function_table()
        yield


@attrs.frozen
class _Target:
    """The attribute that a patch replaces."""

    owner: Any
    """A module or class; ``_ABSENT`` if it does not exist."""
    name: str
    value: Any

    @classmethod
    def of(cls, patch: Patch) -> _Target:
        module_name, _, path = patch.target.partition(":")
        *outer, name = path.split(".")
        try:
            with warnings.catch_warnings():
                # Megatron warns about each optional accelerator package that is missing.
                warnings.simplefilter("ignore")
                owner: Any = importlib.import_module(module_name)
            for part in outer:
                owner = getattr(owner, part)
        except (ImportError, AttributeError):
            return cls(_ABSENT, name, _ABSENT)
        return cls(owner, name, getattr(owner, name, _ABSENT))


def _releases(packages: Set[str]) -> dict[str, tuple[str, str]]:
    """Map each package to (distribution, installed version)."""
    search_path = tuple(sys.path)
    installed = _distributions(search_path)
    found = {}
    for package in packages:
        if package in sys.stdlib_module_names:
            found[package] = "Python", platform.python_version()
        else:
            distribution = installed.get(package, [package])[0]
            found[package] = distribution, _version(distribution, search_path)
    return found


@functools.cache  # reading the metadata of every installed distribution takes 0.1 s
def _distributions(search_path: tuple[str, ...]) -> Mapping[str, list[str]]:
    """Map each importable package to its distributions on a ``sys.path``."""
    return importlib.metadata.packages_distributions()


@functools.cache  # as above: for the packages of a platform's patches, it takes 0.05 s
def _version(distribution: str, search_path: tuple[str, ...]) -> str:
    """Return the version of a distribution on a ``sys.path``."""
    return importlib.metadata.version(distribution)


def _problem(patch: Patch, target: _Target, distribution: str, version: str) -> str | None:
    if version not in SpecifierSet(patch.versions):
        return (
            f"{patch.target} was checked against {distribution} {patch.versions}, found {version}"
        )
    if target.owner is _ABSENT or (target.value is _ABSENT and not patch.missing_ok):
        return f"{patch.target} does not exist in {distribution} {version}"
    found = source_hash(target.value)
    if (found is None and not patch.source_hash) or found in patch.source_hash:
        return None
    if not patch.source_hash:
        return f"{patch.target} has Python source: expected a source_hash, found {found}"
    expected = " or ".join(patch.source_hash)
    return (
        f"the source of {patch.target} has changed: expected {expected}, "
        f"found {found or 'no Python source'}"
    )


def _restore(target: _Target, before: object) -> None:
    """Restore an attribute; remove it if it was inherited or missing before the patch."""
    if before is _ABSENT:
        delattr(target.owner, target.name)
    else:
        setattr(target.owner, target.name, before)


def _clear_torch_function_table() -> None:
    """Clear torch.compile's table of torch functions, which is keyed by object, not by name."""
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None:
        rules.clear_lru_cache()
