"""Every call of a plugin's hook while runs are planned and made, seen below our own code.

pluggy's ``register`` is what every plugin goes through: there each implementation is put inside
one that notes the call. What it notes is what happened, whatever the kernel or the plan think.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import attrs
import pluggy

MARK = "ascend_run_impl"
"""What pluggy's marker puts on an implementation."""


@attrs.frozen
class Call:
    """One plugin asked, told, or its wrapper applied."""

    hook: str
    plugin: str
    what: str
    """``asked`` and answered something; ``none``: asked and answered None; ``applied``: what it
    answered was called by the kernel."""


@contextmanager
def called_hooks() -> Iterator[list[Call]]:
    """The calls made in the block, in their order."""
    calls: list[Call] = []
    original = pluggy.PluginManager.register

    def register(self: pluggy.PluginManager, plugin: Any, name: str | None = None) -> str | None:
        for attribute in dir(plugin):
            method = getattr(plugin, attribute, None)
            options = getattr(method, MARK, None)
            if callable(method) and options is not None and not hasattr(method, "ascend_noted"):
                hook = options.get("specname") or attribute
                setattr(plugin, attribute, _noted(method, hook, plugin.manifest.name, calls))
        return original(self, plugin, name)

    with mock.patch.object(pluggy.PluginManager, "register", register):
        yield calls


def _noted(
    method: Callable[..., Any], hook: str, plugin: str, calls: list[Call]
) -> Callable[..., Any]:
    @functools.wraps(method)  # with the marker and, for pluggy, the signature
    def noted(*arguments: Any, **named: Any) -> Any:
        result = method(*arguments, **named)
        calls.append(Call(hook, plugin, "none" if result is None else "asked"))
        return _applied(result, hook, plugin, calls)

    noted.ascend_noted = True
    return noted


def _applied(result: Any, hook: str, plugin: str, calls: list[Call]) -> Any:
    """A wrapper that notes when it is applied; anything else as it is."""
    from ascend_run.plugin_api.hook_kinds import HookKind
    from ascend_run.plugin_api.hookspecs import hook_points

    if result is None or hook_points()[hook].kind is not HookKind.WRAPPER:
        return result

    def applied(inner: Any) -> Any:
        calls.append(Call(hook, plugin, "applied"))
        return result(inner)

    return applied
