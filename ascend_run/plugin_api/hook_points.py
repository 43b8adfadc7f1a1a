"""The hook specifications as data: name, kind and arguments."""

from __future__ import annotations

import inspect

import attrs

from . import hookspecs
from .hookspecs import HookKind


@attrs.frozen
class HookPoint:
    """One hook of the API."""

    name: str
    kind: HookKind
    arguments: tuple[str, ...]


def hook_points() -> dict[str, HookPoint]:
    """Every hook by name, in the order in which a run reaches them."""
    return {
        name: HookPoint(
            name, function.ascend_hook_kind, tuple(inspect.signature(function).parameters)
        )
        for name, function in vars(hookspecs).items()
        if hasattr(function, "ascend_hook_kind")
    }
