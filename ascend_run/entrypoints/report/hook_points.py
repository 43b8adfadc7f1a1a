"""The plan as a drawing needs it: hooks sorted by point, each with what wraps what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from ascend_run.plugin_api import HookKind, Point
from ascend_run.plugin_api.hook_points import hook_points

from .run_folder import items

PREFIX: Final = "ascend_"


@attrs.frozen
class Seam:
    """One hook with its owners."""

    name: str
    """Without the prefix."""
    kind: str
    owners: tuple[str, ...]
    """Innermost (or first called) first."""
    inside: str | None
    """What a wrapper's innermost owner wraps; None for a hook that wraps nothing."""


def seams_by_point(plan: Mapping[str, Any]) -> dict[Point, list[Seam]]:
    """Every hook that is implemented, under its point; all points are there."""
    hooks = items(plan.get("hooks"))
    owners = {str(hook.get("hook", "?")): _owners(hook) for hook in hooks}
    known = hook_points()
    grouped: dict[Point, list[Seam]] = {point: [] for point in Point}
    for hook in hooks:
        name, kind = str(hook.get("hook", "?")), str(hook.get("kind", ""))
        if not owners[name]:
            continue
        point = known.get(name)  # None for a hook of another version's plan
        short = name.removeprefix(PREFIX)
        inside = None
        if kind == HookKind.WRAPPER:
            inner = owners.get(point.wraps or "", ()) if point else ()
            inside = inner[0] if inner else f"ascend-run's own {short.replace('_', ' ')}"
        seam = Seam(short, kind, owners[name], inside)
        grouped[point.point if point else Point.RUN].append(seam)
    return grouped


def free_hooks(point: Point, seams: list[Seam]) -> list[str]:
    """Hooks of a point that no plugin provides, where ascend-run's own is used."""
    taken = {seam.name for seam in seams}
    names = [
        hook.name.removeprefix(PREFIX)
        for hook in hook_points().values()
        if hook.point is point and hook.kind in (HookKind.PROVIDER, HookKind.WRAPPER)
    ]
    return [] if point is Point.RUN else [name for name in names if name not in taken]


def _owners(hook: Mapping[str, Any]) -> tuple[str, ...]:
    owners = hook.get("owners")
    return tuple(str(owner) for owner in owners) if isinstance(owners, list) else ()
