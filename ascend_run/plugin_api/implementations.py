"""The hooks and claims of a plugin class, read without an instance."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import attrs

from ascend_run.types.declarations import Claim

from .hook_kinds import PROJECT
from .hookspecs import hook_points
from .manifest import EnabledPlugin


@attrs.frozen
class Implementation:
    """A method that is marked as a hook implementation."""

    hook: str
    arguments: tuple[str, ...]
    options: Mapping[str, object]  #: pluggy's options, as passed to ``hookimpl``.


def implementations(plugin: object) -> Mapping[str, Implementation]:
    """Return hook name -> its implementation, inherited ones included; sorted by method name.

    Args:
        plugin: A class, or an instance, of which no attribute is read.
    """
    return _of_class(plugin if isinstance(plugin, type) else type(plugin))


def claims_of(plugin: EnabledPlugin | type[Any]) -> tuple[Claim, ...]:
    """Return the claims of a plugin: those implied by its provider hooks, and those declared in its
    manifest.

    A platform implements provider hooks as the default, and thereby claims only ``platform``.
    """
    hooks = implementations(plugin)
    points = hook_points().values()
    derived = [point.claim for point in points if point.claim and point.name in hooks]
    declared = plugin.manifest.claims
    if Claim.PLATFORM in (*derived, *declared):
        derived = [Claim.PLATFORM]
    return tuple(dict.fromkeys((*derived, *declared)))


@lru_cache(maxsize=1024)
def _of_class(plugin: type[Any]) -> Mapping[str, Implementation]:
    found: dict[str, Implementation] = {}
    for attribute in sorted(dir(plugin)):
        held = inspect.getattr_static(plugin, attribute, None)
        function = held.__func__ if isinstance(held, staticmethod | classmethod) else held
        options = getattr(function, f"{PROJECT}_impl", None) if callable(function) else None
        if isinstance(options, Mapping):
            hook = options.get("specname") or attribute
            parameters = tuple(inspect.signature(function).parameters)
            unbound = parameters[0 if isinstance(held, staticmethod) else 1 :]
            found[hook] = Implementation(hook, unbound, options)
    return MappingProxyType(found)
