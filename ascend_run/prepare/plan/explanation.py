"""Which plugins implement which hook, in which order, and why: data for ``plan``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import attrs

from ascend_run.plugin_api import HookKind, LinkPlace, Manifest
from ascend_run.plugin_api.hook_kinds import HookPoint
from ascend_run.plugin_api.hookspecs import hook_points
from ascend_run.plugin_api.implementations import implementations
from ascend_run.registry.kinds import CHOSEN_WITH, Kind, Plugin, kind_of
from ascend_run.registry.resolution import Resolution

if TYPE_CHECKING:
    from ascend_run.types.config import RunConfig

BY_NAME: Final = "enabled by name"


@attrs.frozen
class HookOwners:
    """A hook and the plugins that implement it."""

    hook: str
    kind: str  #: A ``HookKind``, or a kind of another version, whose plan is read.
    point: str  #: A ``Point``, likewise.
    owners: tuple[str, ...]  #: In the order in which they are called or applied.
    why: str


@attrs.frozen
class ForwardLinks:
    """The chain around the forward of one kind of module, as declared in manifests."""

    module: str
    links: tuple[str, ...]  #: Plugins, innermost first.
    compilers: tuple[str, ...]
    """Plugins that compile groups of adjacent links, or exclude them from graphs."""


def explain_hooks(resolution: Resolution) -> tuple[HookOwners, ...]:
    """Return every implemented hook, in the order in which a run reaches them."""
    explained: list[HookOwners] = []
    implemented = [(plugin, implementations(plugin).keys()) for plugin in resolution.order]
    for point in hook_points().values():
        owners = [plugin for plugin, hooks in implemented if point.name in hooks]
        if point.kind is HookKind.PROVIDER:  # the platform is called last, as the default
            owners.sort(key=lambda plugin: kind_of(plugin) is Kind.PLATFORM)
        if owners:
            names = tuple(plugin.manifest.name for plugin in owners)
            why = _why(point, owners, resolution)
            explained.append(HookOwners(point.name, str(point.kind), str(point.point), names, why))
    return tuple(explained)


def explain_forwards(manifests: Sequence[Manifest]) -> tuple[ForwardLinks, ...]:
    """Return the forward chain of every kind of module that has links, by name.

    Args:
        manifests: Those of the instances, since links may depend on options; in resolved order.
    """
    explained: list[ForwardLinks] = []
    for module in sorted({kind for manifest in manifests for kind in manifest.forward_links}):
        places = [(m.name, m.forward_links[module]) for m in manifests if module in m.forward_links]
        own, around, compilers = (
            tuple(name for name, at in places if at is place)
            for place in (LinkPlace.OWN, LinkPlace.AROUND, LinkPlace.COMPILER)
        )
        explained.append(ForwardLinks(module, (*own, *around), compilers))
    return tuple(explained)


def explain_plugin(plugin: Plugin, resolution: Resolution) -> str:
    """Explain why a plugin is enabled, and its position in the order."""
    manifest = plugin.manifest
    kind = kind_of(plugin)
    named = f"the {kind} of the run ({CHOSEN_WITH[kind]})"
    reason = BY_NAME if kind is Kind.FEATURE else named
    declared = [
        why
        for outer, inner in resolution.inner.items()
        for name, why in inner.items()
        if manifest.name in (outer, name)
    ]
    if declared:
        return "; ".join((reason, *sorted(declared)))
    if kind is Kind.PLATFORM:
        return f"{reason}; the default of every provider hook, called last"
    peers = [name for name in resolution.of_kind(kind) if name != manifest.name]
    return f"{reason}; no declared order: sorted by name" if peers else reason


def idle(resolution: Resolution, config: RunConfig) -> dict[str, str]:
    """Return plugins that have no effect in this run -> the condition that makes them idle."""
    conditions = {plugin.manifest.name: plugin.manifest.idle for plugin in resolution.order}
    return {n: str(c) for n, c in conditions.items() if c is not None and c.holds(config)}


def _why(point: HookPoint, owners: Sequence[Plugin], resolution: Resolution) -> str:
    if point.kind is HookKind.PROVIDER:
        return "; else ".join(_why_called(point, plugin) for plugin in owners)
    if len(owners) == 1:
        return "the only implementation"
    manner = {
        HookKind.WRAPPER: "innermost first",
        HookKind.CONTRIBUTION: "merged",
        HookKind.LISTENER: "notified in this order",
    }[point.kind]
    steps = [_why_next(a, b, resolution) for a, b in pairwise(owners)]
    return f"{manner}; {'; '.join(steps)}"


def _why_called(point: HookPoint, plugin: Plugin) -> str:
    manifest = plugin.manifest
    if kind_of(plugin) is Kind.PLATFORM:
        return f"{manifest.name}: the platform's default"
    return f"{manifest.name}: claims {point.claim}"


def _why_next(inner: Plugin, outer: Plugin, resolution: Resolution) -> str:
    """Why ``inner`` is applied directly before ``outer``."""
    first, second = inner.manifest.name, outer.manifest.name
    path = _declared_path(first, second, resolution)
    if len(path) == 2:
        return resolution.inner[second][first]
    if path:
        return f"{second} comes after {first} through {', '.join(path[1:-1])}"
    if kind_of(inner) is not kind_of(outer):
        return f"{second}: a {kind_of(outer)} comes after a {kind_of(inner)}"
    return f"{first}, {second}: no declared order, sorted by name"


def _declared_path(first: str, last: str, resolution: Resolution) -> list[str]:
    """A shortest chain of declarations from ``first`` out to ``last``; empty if there is none."""
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
