"""The hook specifications as data: what registry, core, ``plan`` and the report know of a hook."""

from __future__ import annotations

import inspect

import attrs

from . import hookspecs
from .hook_kinds import HookKind, HookMarks, Point
from .manifest import Claim


@attrs.frozen
class HookPoint:
    """One hook of the API."""

    name: str
    arguments: tuple[str, ...]
    marks: HookMarks

    @property
    def kind(self) -> HookKind:
        """How several answers combine."""
        return self.marks.kind

    @property
    def point(self) -> Point:
        """The part of a run that it belongs to."""
        return self.marks.point

    @property
    def claim(self) -> Claim | None:
        """The seam that whoever implements it must claim."""
        return self.marks.claim


def hook_points() -> dict[str, HookPoint]:
    """Every hook by name, in the order in which a run reaches them."""
    return {
        name: HookPoint(
            name, tuple(inspect.signature(function).parameters), function.ascend_hook_marks
        )
        for name, function in vars(hookspecs).items()
        if hasattr(function, "ascend_hook_marks")
    }
