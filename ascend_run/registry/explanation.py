"""Who owns which hook, in which order, and why: plain data for ``plan``, read from classes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import attrs

from ascend_run.plugin_api import HookError, HookKind, Point
from ascend_run.plugin_api.hook_points import HookPoint, hook_points

from .hooks import hook_problems, implementations
from .kinds import CHOSEN_WITH, Kind, Plugin, kind_of
from .resolution import Resolution

BY_NAME: Final = "enabled by name"


@attrs.frozen
class HookOwners:
    """The plugins behind one hook."""

    hook: str
    kind: HookKind
    point: Point
    owners: tuple[str, ...]
    """In the order in which they are asked, applied or told."""
    why: str


def check_hooks(plugins: Sequence[Plugin]) -> None:
    """Refuse implementations that would never be called as their author meant.

    Raises:
        HookError: Every such implementation, with the nearest hook.
    """
    problems = [problem for plugin in plugins for problem in hook_problems(plugin)]
    if problems:
        raise HookError("a plugin does not keep to the hooks of the API", problems)


def explain_hooks(resolution: Resolution) -> tuple[HookOwners, ...]:
    """Every hook that someone implements, in the order in which a run reaches them."""
    explained: list[HookOwners] = []
    implemented = [(plugin, implementations(plugin).keys()) for plugin in resolution.order]
    for point in hook_points().values():
        owners = [plugin for plugin, hooks in implemented if point.name in hooks]
        if point.kind is HookKind.PROVIDER:  # the platform is asked last, as the default
            owners.sort(key=lambda plugin: kind_of(plugin.manifest) is Kind.PLATFORM)
        if owners:
            names = tuple(plugin.manifest.name for plugin in owners)
            explained.append(
                HookOwners(
                    point.name, point.kind, point.point, names, _why(point, owners, resolution)
                )
            )
    return tuple(explained)


def explain_plugin(plugin: Plugin, resolution: Resolution) -> str:
    """Why a plugin is in the set, and why it stands where it stands."""
    manifest = plugin.manifest
    kind = kind_of(manifest)
    named = f"the {kind} of the run ({CHOSEN_WITH[kind]})"
    reason = BY_NAME if kind is Kind.FEATURE else named
    declared = resolution.inner[manifest.name]
    inner = [f"{why} {other}" for other, why in sorted(declared.items())]
    if inner:
        return f"{reason}; outside of others as it declares: {', '.join(inner)}"
    if kind is Kind.PLATFORM:
        return f"{reason}; asked last by every provider, as the default"
    peers = [name for name in resolution.of_kind(kind) if name != manifest.name]
    return f"{reason}; declares no order: by name" if peers else reason


def idle(resolution: Resolution, config: Any) -> dict[str, str]:
    """Plugins that change nothing in this run -> the condition under which they do not.

    Args:
        config: The RunConfig.
    """
    conditions = {plugin.manifest.name: plugin.manifest.idle for plugin in resolution.order}
    return {n: str(c) for n, c in conditions.items() if c is not None and c.holds(config)}


def _why(point: HookPoint, owners: Sequence[Plugin], resolution: Resolution) -> str:
    if point.kind is HookKind.PROVIDER:
        return "; else ".join(_why_asked(point, plugin) for plugin in owners)
    if len(owners) == 1:
        return "only one implements it"
    manner = {
        HookKind.WRAPPER: "innermost first",
        HookKind.CONTRIBUTION: "merged",
        HookKind.LISTENER: "told in this order",
    }[point.kind]
    steps = [_why_next(a, b, resolution) for a, b in pairwise(owners)]
    return f"{manner}; {'; '.join(steps)}"


def _why_asked(point: HookPoint, plugin: Plugin) -> str:
    manifest = plugin.manifest
    if kind_of(manifest) is Kind.PLATFORM:
        return f"{manifest.name}: the platform's default"
    return f"{manifest.name}: claims {point.claim}"


def _why_next(inner: Plugin, outer: Plugin, resolution: Resolution) -> str:
    """Why one stands further in than the next."""
    first, second = inner.manifest.name, outer.manifest.name
    path = _declared_path(first, second, resolution)
    if len(path) == 2:
        return f"{second} {_verb(resolution.inner[second][first])} {first}"
    if path:
        return f"{second} comes after {first} by way of {', '.join(path[1:-1])}"
    if kind_of(inner.manifest) is not kind_of(outer.manifest):
        return f"{second}: a {kind_of(outer.manifest)} comes after a {kind_of(inner.manifest)}"
    return f"{first}, {second}: no order declared, by name"


def _verb(why: str) -> str:
    return "requires" if why == "requires" else "declares to be after"


def _declared_path(first: str, last: str, resolution: Resolution) -> list[str]:
    """A shortest chain of declarations from ``first`` out to ``last``; empty without one."""
    paths = [[last]]
    seen = {last}
    for path in paths:
        for name in sorted(resolution.inner[path[-1]]):
            if name == first:
                return [first, *reversed(path)]
            if name not in seen:
                seen.add(name)
                paths.append([*path, name])
    return []
