"""What is known of a hook beside its arguments: put on its specification by a decorator."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Final, TypeVar

import attrs
import pluggy

from .manifest import Claim

PROJECT: Final = "ascend_run"

hookimpl = pluggy.HookimplMarker(PROJECT)
_hookspec = pluggy.HookspecMarker(PROJECT)

F = TypeVar("F", bound=Callable[..., Any])


class HookKind(enum.StrEnum):
    """How the answers of several plugins combine."""

    PROVIDER = "provider"
    """Exactly one plugin answers; the platform, asked last, is the default."""
    WRAPPER = "wrapper"
    """Every answer is a function from the inner thing to the outer; applied in resolved order, so
    the first plugin is innermost."""
    CONTRIBUTION = "contribution"
    """All answers are merged; a key given twice is an error that names both plugins."""
    LISTENER = "listener"
    """Told of events, on every rank; answers nothing."""


class Point(enum.StrEnum):
    """The part of a run that a hook belongs to, in the order of the flow."""

    MODEL = "Model build"
    ATTENTION = "Attention"
    MOE = "MoE"
    OPTIMIZER = "Optimizer"
    CHECKPOINT = "Checkpoint"
    COMM = "Comm"
    RUN = "The run around them"


@attrs.frozen(kw_only=True)
class HookMarks:
    """What a specification's decorator says."""

    kind: HookKind
    point: Point
    claim: Claim | None = None
    """A plugin that implements the hook must claim this seam; the platform, whose answer is the
    default, need not."""
    torch_free: bool = False
    """Called while a run is planned, before torch is imported."""
    wraps: str | None = None
    """The provider whose answer the innermost wrapper is given; None: the kernel's own thing."""


def _mark(marks: HookMarks) -> Callable[[F], F]:
    def mark(function: F) -> F:
        function.ascend_hook_marks = marks  # type: ignore[attr-defined]
        return _hookspec(function, firstresult=marks.kind is HookKind.PROVIDER)

    return mark


def provider(*, point: Point, claim: Claim, torch_free: bool = False) -> Callable[[F], F]:
    """A hook that one plugin answers, and by its claim says so."""
    return _mark(HookMarks(kind=HookKind.PROVIDER, point=point, claim=claim, torch_free=torch_free))


def wrapper(*, point: Point, wraps: str | None = None) -> Callable[[F], F]:
    """A hook whose answers are put around one another."""
    return _mark(HookMarks(kind=HookKind.WRAPPER, point=point, wraps=wraps))


def contribution(*, point: Point, torch_free: bool = False) -> Callable[[F], F]:
    """A hook whose answers are merged."""
    return _mark(HookMarks(kind=HookKind.CONTRIBUTION, point=point, torch_free=torch_free))


def listener(*, point: Point = Point.RUN) -> Callable[[F], F]:
    """A hook that is told."""
    return _mark(HookMarks(kind=HookKind.LISTENER, point=point))
