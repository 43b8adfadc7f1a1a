"""The hooks and claims of a plugin class, read without an instance."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from ascend_run.types.declarations import Claim

from .hook_kinds import PROJECT
from .hook_points import hook_points
from .manifest import EnabledPlugin


@attrs.frozen
class Implementation:
    """A method that is marked as a hook implementation."""

    hook: str
    arguments: tuple[str, ...]
    options: Mapping[str, object]
    """pluggy's options, as passed to ``hookimpl``."""


def implementations(plugin: object) -> dict[str, Implementation]:
    """Return hook name -> its implementation, inherited ones included; sorted by method name."""
    found: dict[str, Implementation] = {}
    for attribute, hook, options in _marked(plugin):
        function = getattr(plugin, attribute)
        static = isinstance(inspect.getattr_static(plugin, attribute), staticmethod)
        bound = inspect.ismethod(function)
        parameters = tuple(inspect.signature(function).parameters)
        found[hook] = Implementation(hook, parameters[0 if static or bound else 1 :], options)
    return found


def claims_of(plugin: EnabledPlugin | type[Any]) -> tuple[Claim, ...]:
    """Return the claims of a plugin: those implied by its provider hooks, and those declared in its
    manifest.

    A platform implements provider hooks as the default, and thereby claims only ``platform``.
    """
    hooks = {hook for _, hook, _ in _marked(plugin)}
    points = hook_points().values()
    derived = [point.claim for point in points if point.claim and point.name in hooks]
    declared = plugin.manifest.claims
    if Claim.PLATFORM in (*derived, *declared):
        derived = [Claim.PLATFORM]
    return tuple(dict.fromkeys((*derived, *declared)))


def _marked(plugin: object) -> Iterator[tuple[str, str, Mapping[str, object]]]:
    """(attribute, hook, pluggy's options) of each implementation."""
    for attribute in sorted(dir(plugin)):
        function = getattr(plugin, attribute, None)
        options = getattr(function, f"{PROJECT}_impl", None)
        if callable(function) and isinstance(options, Mapping):
            yield attribute, options.get("specname") or attribute, options
