"""Count the calls of plugins' listeners, and see whether an error in one names the plugin."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import attrs

from ascend_run.plugin_api.hook_kinds import PROJECT, HookKind
from ascend_run.plugin_api.hookspecs import hook_points

MESSAGE: Final = "an error that the kit raises in a listener"


def listener_hooks() -> frozenset[str]:
    """Return the names of all listeners of the API."""
    return frozenset(p.name for p in hook_points().values() if p.kind is HookKind.LISTENER)


@attrs.define
class Listeners:
    """Calls of the listeners of one plugin."""

    calls: dict[str, int] = attrs.field(factory=dict)
    """Method -> calls. Methods that are named as a listener count even if they are not marked as
    one."""
    hooks: dict[str, str] = attrs.field(factory=dict)
    """Method -> the hook that it listens to."""
    raises: str = ""
    """Method that raises an error instead."""


@contextmanager
def watched_listeners(plugin: type[Any]) -> Iterator[Listeners]:
    """Watch the listeners of a plugin whose instances are registered inside the block."""
    listeners = Listeners()
    own = dict(vars(plugin))
    listeners.hooks = dict(_methods(plugin))
    for name in listeners.hooks:
        listeners.calls[name] = 0
        setattr(plugin, name, _watched(inspect.getattr_static(plugin, name), name, listeners))
    try:
        yield listeners
    finally:
        for name in listeners.hooks:
            if name in own:
                setattr(plugin, name, own[name])
            else:
                delattr(plugin, name)


def _methods(plugin: type[Any]) -> Iterator[tuple[str, str]]:
    """(method, hook) of each method that is marked as a listener, or has the name of one."""
    hooks = listener_hooks()
    for name in dir(plugin):
        marks = getattr(getattr(plugin, name, None), f"{PROJECT}_impl", None) or {}
        hook = marks.get("specname") or name
        if hook in hooks:
            yield name, hook


def _watched(method: Any, name: str, listeners: Listeners) -> Any:
    kind = type(method) if isinstance(method, staticmethod | classmethod) else None
    function: Callable[..., Any] = method.__func__ if kind else method

    @functools.wraps(function)
    def watched(*arguments: Any, **named: Any) -> Any:
        if listeners.raises == name:
            raise RuntimeError(MESSAGE)
        listeners.calls[name] += 1
        return function(*arguments, **named)

    return kind(watched) if kind else watched


def unnamed_errors(
    listeners: Listeners, plugin: str, notify: Callable[[str], None]
) -> Iterator[str]:
    """Yield each listener that was called and whose error does not name the plugin.

    Args:
        notify: Notifies the listeners of an event.
    """
    for name, calls in listeners.calls.items():
        listeners.raises = name
        try:
            notify(listeners.hooks[name])
        except Exception as error:
            lines = [str(error), *getattr(error, "__notes__", ())]
            if any(f"'{plugin}'" in line for line in lines):
                continue
        if calls:
            yield name
    listeners.raises = ""
