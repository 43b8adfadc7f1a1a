"""The hook specifications as data, for the registry, core, ``plan`` and the report."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from . import hookspecs
from .hook_kinds import HookPoint


@cache
def hook_points() -> Mapping[str, HookPoint]:
    """Return every hook by name, in the order in which a run reaches them."""
    marked = (getattr(function, "ascend_hook_point", None) for function in vars(hookspecs).values())
    return {point.name: point for point in marked if point is not None}
