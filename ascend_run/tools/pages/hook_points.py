"""The hooks of a plan, grouped by point, with the order of wrapping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs

from ascend_run.plugin_api import HookKind, Point
from ascend_run.plugin_api.hookspecs import hook_points
from ascend_run.prepare.plan.explanation import HookOwners

PREFIX: Final = "ascend_"


@attrs.frozen
class Seam:
    """One hook and the plugins that implement it."""

    name: str
    """Name without the prefix ``ascend_``."""
    kind: str
    owners: tuple[str, ...]
    """Innermost (or first called) first."""
    inside: str | None
    """What the innermost wrapper wraps; None if the hook is not a wrapper."""


def seams_by_point(hooks: Sequence[HookOwners]) -> dict[Point, list[Seam]]:
    """Return point -> implemented hooks, for all points."""
    owners = {hook.hook: hook.owners for hook in hooks}
    known = hook_points()
    grouped: dict[Point, list[Seam]] = {point: [] for point in Point}
    for hook in hooks:
        if not hook.owners:
            continue
        point = known.get(hook.hook)  # None for a hook of another version's plan
        short = hook.hook.removeprefix(PREFIX) or "?"
        inside = None
        if hook.kind == HookKind.WRAPPER:
            inner = owners.get(point.wraps or "", ()) if point else ()
            inside = inner[0] if inner else f"built-in {short.replace('_', ' ')}"
        seam = Seam(short, hook.kind, hook.owners, inside)
        grouped[point.point if point else Point.RUN].append(seam)
    return grouped


def free_hooks(point: Point, seams: list[Seam]) -> list[str]:
    """Return the provider hooks of a point without a plugin, for which the built-in is used."""
    taken = {seam.name for seam in seams}
    names = [
        hook.name.removeprefix(PREFIX)
        for hook in hook_points().values()
        if hook.point is point and hook.kind in (HookKind.PROVIDER, HookKind.WRAPPER)
    ]
    return [] if point is Point.RUN else [name for name in names if name not in taken]
