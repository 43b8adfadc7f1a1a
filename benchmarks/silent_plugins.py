"""Plugins that implement every listener and do nothing, or nothing but count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from ascend_run.plugin_api import HookKind, Manifest, hookimpl
from ascend_run.plugin_api.hook_points import hook_points


def listener_names() -> list[str]:
    """Every event of the API."""
    return [name for name, point in hook_points().items() if point.kind is HookKind.LISTENER]


def silent_plugins(count: int) -> list[Any]:
    """``count`` plugins with a method for every event that does nothing."""

    def make(_: str) -> Callable[..., None]:
        def listener(self: Any, context: Any) -> None:
            pass

        return listener

    return [_plugin(index, make) for index in range(count)]


def counting_plugins(count: int, calls: Counter[str]) -> list[Any]:
    """As ``silent_plugins``; each call adds one to ``calls[event]``."""

    def make(event: str) -> Callable[..., None]:
        def listener(self: Any, context: Any) -> None:
            calls[event] += 1

        return listener

    return [_plugin(index, make) for index in range(count)]


def before_each_step(tell: Callable[[], None]) -> Any:
    """A plugin that tells of every step before it begins."""

    def listener(self: Any, context: Any) -> None:
        tell()

    members = {"ascend_before_step": hookimpl(listener)}
    manifest = Manifest(name="step-teller", summary="tells of every step")
    return type("StepTeller", (), {**members, "manifest": manifest})()


def _plugin(index: int, make: Callable[[str], Callable[..., None]]) -> Any:
    name = f"silent-{index}"
    members: dict[str, Any] = {event: hookimpl(make(event)) for event in listener_names()}
    manifest = Manifest(name=name, summary="listens to everything")
    return type(name, (), {**members, "manifest": manifest})()
