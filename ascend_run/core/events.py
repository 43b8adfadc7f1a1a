"""Compile an event to one function that calls its listeners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import pluggy

from ascend_run.plugin_api.hook_kinds import HookPoint
from ascend_run.plugin_api.manifest import EnabledPlugin

from .hook_errors import name_hook

_FIRST_CALL: Final = 3
"""Line of the first listener's call in the generated source."""


def compile_event(
    point: HookPoint, listeners: Sequence[pluggy.HookImpl], plugins: Sequence[EnabledPlugin]
) -> Callable[..., None]:
    """Generate a function that calls each listener with the arguments it takes.

    A loop over (function, argument names) would build a dict per call. The generated source makes
    one plain call per listener, inside of one ``try``, which costs nothing. Each call has its own
    line, so the line of an exception says which listener raised it.

    Args:
        plugins: The plugin of each listener.
    """

    def name_listener(error: Exception) -> None:
        assert error.__traceback__ is not None, "it was caught in the generated function"
        name_hook(error, point.name, plugins[error.__traceback__.tb_lineno - _FIRST_CALL])

    scope: dict[str, Any] = {f"f{i}": impl.function for i, impl in enumerate(listeners)}
    scope["name_listener"] = name_listener
    calls = [
        f"  f{i}({', '.join(f'{name}={name}' for name in impl.argnames)})"
        for i, impl in enumerate(listeners)
    ]
    named = [" try:", *calls, " except Exception as error:", "  name_listener(error)", "  raise"]
    lines = [f"def {point.name}({', '.join(point.arguments)}):", *(named if calls else [" pass"])]
    exec("\n".join(lines), scope)
    event: Callable[..., None] = scope[point.name]
    return event
