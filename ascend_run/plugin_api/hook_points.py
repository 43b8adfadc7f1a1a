"""The hook specifications as data, for the registry, core, ``plan`` and the report."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache

import attrs

from . import hookspecs
from .hook_kinds import HookMarks


@attrs.frozen(kw_only=True)
class HookPoint(HookMarks):
    """One hook of the API."""

    name: str
    arguments: tuple[str, ...]


@cache
def hook_points() -> Mapping[str, HookPoint]:
    """Return every hook by name, in the order in which a run reaches them."""
    return {
        name: HookPoint(
            name=name,
            arguments=tuple(inspect.signature(function).parameters),
            **attrs.asdict(function.ascend_hook_marks, recurse=False),
        )
        for name, function in vars(hookspecs).items()
        if hasattr(function, "ascend_hook_marks")
    }
