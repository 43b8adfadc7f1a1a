"""Metadata of hooks, attached to their specifications by decorators."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable
from typing import Any, Final, TypeVar

import attrs
import pluggy

from ascend_run.types.declarations import Claim

PROJECT: Final = "ascend_run"

hookimpl = pluggy.HookimplMarker(PROJECT)
"""Decorator of a method that implements the hook of its name."""
_hookspec = pluggy.HookspecMarker(PROJECT)

F = TypeVar("F", bound=Callable[..., Any])


class HookKind(enum.StrEnum):
    """How the return values of several plugins are combined."""

    PROVIDER = "provider"
    """Exactly one plugin provides the value; the platform, called last, is the default."""
    WRAPPER = "wrapper"
    """Every plugin returns a function from the inner object to the outer one; applied in resolved
    order, so the first plugin is innermost."""
    CONTRIBUTION = "contribution"
    """All return values are merged; a duplicate key is an error that names both plugins."""
    LISTENER = "listener"  #: Notified of events, on every rank; returns nothing.


class Point(enum.StrEnum):
    """The part of a run that a hook belongs to, in the order in which a run reaches them."""

    MODEL = "Model build"  #: Its modules and weights.
    ATTENTION = "Attention"  #: Kernels, masks, sharded sequences.
    MOE = "MoE"  #: Router, dispatcher, experts.
    OPTIMIZER = "Optimizer"  #: Update and schedule.
    CHECKPOINT = "Checkpoint"  #: What is saved, and where.
    COMM = "Comm"  #: Groups and collectives.
    RUN = "The run around them"  #: Checks, data, listeners, report.


@attrs.frozen(kw_only=True)
class HookPoint:
    """One hook of the API."""

    name: str
    arguments: tuple[str, ...]
    kind: HookKind
    point: Point
    claim: Claim | None = None
    """Claim of a plugin that implements the hook: it is the only owner. The platform, which is the
    default, does not make it."""
    torch_free: bool = False
    """Whether it is called while a run is planned, before torch is imported."""
    wraps: str | None = None
    """The provider whose value the innermost wrapper wraps; None: the kernel's own object."""
    first_user: str | None = None
    """The planned feature that will implement the hook first; None once a built-in plugin does."""


def _mark(kind: HookKind, **marks: Any) -> Callable[[F], F]:
    def mark(function: F) -> F:
        arguments = tuple(inspect.signature(function).parameters)
        point = HookPoint(name=function.__name__, arguments=arguments, kind=kind, **marks)
        function.ascend_hook_point = point  # type: ignore[attr-defined]
        return _hookspec(function, firstresult=kind is HookKind.PROVIDER)

    return mark


def provider(
    *, point: Point, claim: Claim, torch_free: bool = False, first_user: str | None = None
) -> Callable[[F], F]:
    """Mark a hook that exactly one plugin implements, and thereby owns."""
    marks = {"claim": claim, "torch_free": torch_free, "first_user": first_user}
    return _mark(HookKind.PROVIDER, point=point, **marks)


def wrapper(
    *, point: Point, wraps: str | None = None, first_user: str | None = None
) -> Callable[[F], F]:
    """Mark a hook whose return values wrap one another."""
    return _mark(HookKind.WRAPPER, point=point, wraps=wraps, first_user=first_user)


def contribution(*, point: Point, torch_free: bool = False) -> Callable[[F], F]:
    """Mark a hook whose return values are merged."""
    return _mark(HookKind.CONTRIBUTION, point=point, torch_free=torch_free)


def listener(*, point: Point = Point.RUN, first_user: str | None = None) -> Callable[[F], F]:
    """Mark a hook that is notified of an event."""
    return _mark(HookKind.LISTENER, point=point, first_user=first_user)
