"""Which hooks a plugin class implements: read from the class, without an instance."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

import attrs

from ascend_run.plugin_api.hook_kinds import PROJECT
from ascend_run.plugin_api.hook_points import hook_points

from .kinds import Kind, Plugin, kind_of

_REORDERING = ("tryfirst", "trylast", "wrapper", "hookwrapper")


@attrs.frozen
class Implementation:
    """A method that a plugin marks as a hook implementation."""

    hook: str
    arguments: tuple[str, ...]
    options: Mapping[str, Any]
    """pluggy's, as given to ``hookimpl``."""


def implementations(plugin: Plugin) -> dict[str, Implementation]:
    """Hook name -> what implements it, inherited ones included, by name."""
    found: dict[str, Implementation] = {}
    for attribute in sorted(dir(plugin)):
        function = getattr(plugin, attribute, None)
        options = getattr(function, f"{PROJECT}_impl", None)
        if not callable(function) or not isinstance(options, Mapping):
            continue
        static = isinstance(inspect.getattr_static(plugin, attribute), staticmethod)
        bound = inspect.ismethod(function)
        parameters = tuple(inspect.signature(function).parameters)
        hook = options.get("specname") or attribute
        found[hook] = Implementation(hook, parameters[0 if static or bound else 1 :], options)
    return found


def hook_problems(plugin: Plugin) -> list[str]:
    """Implementations that would never be called, not in the order that ``plan`` shows, or in a
    race with another plugin's, as they answer for a seam that the manifest does not claim."""
    points = hook_points()
    name = plugin.manifest.name
    problems: list[str] = []
    for implementation in implementations(plugin).values():
        hook = implementation.hook
        if hook not in points:
            near = difflib.get_close_matches(hook, points, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            problems.append(f"'{name}' implements {hook}, which is no hook{hint}")
            continue
        claim = points[hook].claim
        is_default = kind_of(plugin.manifest) is Kind.PLATFORM
        if claim and claim not in plugin.manifest.claims and not is_default:
            problems.append(
                f"'{name}' answers {hook} without claiming '{claim}'; add Claim.{claim.name} to "
                "the claims of its manifest"
            )
        for argument in implementation.arguments:
            if argument not in points[hook].arguments:
                known = ", ".join(points[hook].arguments) or "none"
                problems.append(
                    f"'{name}' asks {hook} for {argument!r}; its arguments are: {known}"
                )
        for option in _REORDERING:
            if implementation.options.get(option):
                problems.append(
                    f"'{name}' marks {hook} with {option}; its place comes from the manifest's "
                    "'after'"
                )
    return problems
