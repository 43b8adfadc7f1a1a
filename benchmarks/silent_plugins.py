"""Plugins that implement all listeners and do nothing, or only count the calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from ascend_run.plugin_api import HookKind, Manifest, hookimpl
from ascend_run.plugin_api.hookspecs import hook_points


def listener_names() -> list[str]:
    """Return the names of all listener hooks."""
    return [name for name, point in hook_points().items() if point.kind is HookKind.LISTENER]


def silent_plugins(count: int) -> list[Any]:
    """Return plugins whose listeners do nothing."""

    def make(_: str) -> Callable[..., None]:
        def listener(self: Any, context: Any) -> None:
            pass

        return listener

    return [_plugin(index, make) for index in range(count)]


def counting_plugins(count: int, calls: Counter[str]) -> list[Any]:
    """Return plugins whose listeners add one to ``calls[event]``."""

    def make(event: str) -> Callable[..., None]:
        def listener(self: Any, context: Any) -> None:
            calls[event] += 1

        return listener

    return [_plugin(index, make) for index in range(count)]


def before_each_step(notify: Callable[[], None]) -> Any:
    """Return a plugin that calls a function before each step."""

    def listener(self: Any, context: Any) -> None:
        notify()

    members = {"ascend_before_step": hookimpl(listener)}
    manifest = Manifest(name="step-teller", summary="tells of every step")
    return type("StepTeller", (), {**members, "manifest": manifest})()


def _plugin(index: int, make: Callable[[str], Callable[..., None]]) -> Any:
    name = f"silent-{index}"
    members: dict[str, Any] = {event: hookimpl(make(event)) for event in listener_names()}
    manifest = Manifest(name=name, summary="listens to everything")
    return type(name, (), {**members, "manifest": manifest})()
