"""Other people's functions replaced for the length of a run: checked, applied, undone.

The only place that does so. A patch that does not fit what is installed is refused.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from packaging.specifiers import SpecifierSet

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api.contracts import Patch
from ascend_run.plugin_api.errors import PlatformError


def source_hash(target: Any) -> str:
    """First 16 hex digits of SHA-256 of a function's or class's source."""
    return hashlib.sha256(inspect.getsource(target).encode()).hexdigest()[:16]


def collect_patches(hooks: Hooks) -> list[tuple[str, Patch]]:
    """(plugin, patch) of every enabled plugin.

    Raises:
        PlatformError: A target is patched twice.
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
            found.append((plugin, patch))
    if problems:
        raise PlatformError("patches collide", problems)
    return found


@contextmanager
def applied_patches(hooks: Hooks) -> Iterator[list[tuple[str, Patch]]]:
    """Apply every patch, and put the very same objects back at the end.

    Raises:
        PlatformError: A patch was made for another version, or its target's source has changed.
    """
    patches = collect_patches(hooks)
    problems, places = [], []
    for plugin, patch in patches:
        place = _locate(patch)
        if problem := _misfit(patch, place):
            problems.append(f"'{plugin}': {problem}")
        elif place is not None:
            places.append(place)
    if problems:
        raise PlatformError("patches do not fit what is installed", problems)
    originals = [vars(parent)[name] for parent, name in places]
    try:
        for (_, patch), (parent, name) in zip(patches, places, strict=True):
            setattr(parent, name, patch.replacement)
        yield patches
    finally:
        for (parent, name), original in zip(places, originals, strict=True):
            setattr(parent, name, original)


def _locate(patch: Patch) -> tuple[Any, str] | None:
    """What holds the target as its own attribute, and the attribute's name; None where nothing
    does."""
    module_name, _, path = patch.target.partition(":")
    *parents, name = path.split(".")
    try:
        parent: Any = importlib.import_module(module_name)
        for part in parents:
            parent = getattr(parent, part)
    except (ImportError, AttributeError):
        return None
    return (parent, name) if name in vars(parent) else None


def _misfit(patch: Patch, place: tuple[Any, str] | None) -> str | None:
    top = patch.target.partition(":")[0].partition(".")[0]
    distributions = importlib.metadata.packages_distributions().get(top, [])
    distribution = next(iter(distributions), top)
    version = importlib.metadata.version(distribution)
    if version not in SpecifierSet(patch.versions):
        return (
            f"{patch.target} was checked against {distribution} {patch.versions}, found {version}"
        )
    if place is None:
        return f"{patch.target} is not there in {distribution} {version}"
    target = getattr(*place)
    if patch.source_hash is not None and source_hash(target) != patch.source_hash:
        return (
            f"the source of {patch.target} has changed: expected {patch.source_hash}, "
            f"found {source_hash(target)}"
        )
    return None
