"""Name the plugin, its distribution and the hook that an exception left.

The exception keeps its type, so that a user error stays one. Its note is in every traceback, and in
the text of a user error; ``hook_call_of`` returns the same as data, for the log.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import distributions
from typing import Final, ParamSpec, TypeVar

import attrs

from ascend_run.plugin_api.manifest import EnabledPlugin

P = ParamSpec("P")
T = TypeVar("T")
_KEY: Final = "ascend_run_hook_call"
"""Key of the HookCall in an exception's ``__dict__``."""


@attrs.frozen
class HookCall:
    """The call into a plugin that an exception left."""

    hook: str
    plugin: str
    distribution: str
    """Name and version; for a plugin that is not installed, its module."""

    def __str__(self) -> str:
        return f"raised by '{self.plugin}' of {self.distribution} in {self.hook}"


@attrs.frozen
class NamedErrors:
    """Context manager around a call into a plugin; can be entered any number of times.

    Args:
        hook: The hook that is called, or that returned the function which is called.
    """

    hook: str
    plugin: EnabledPlugin

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            name_hook(error, self.hook, self.plugin)

    def around(self, function: Callable[P, T]) -> Callable[P, T]:
        """Return the function, called inside of this context."""

        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            with self:
                return function(*args, **kwargs)

        return call


def name_hook(error: Exception, hook: str, plugin: EnabledPlugin) -> None:
    """Attach the call to an exception. If calls are nested, the innermost one is named."""
    if hook_call_of(error) is None:
        name = plugin.manifest.name
        call = HookCall(hook, name, _distribution(name, type(plugin)))
        # Not setattr, which the exception's class may refuse.
        error.__dict__[_KEY] = call
        error.add_note(str(call))


def hook_call_of(error: BaseException) -> HookCall | None:
    """Return the call that an exception left; None if it was not raised by a plugin."""
    call: HookCall | None = error.__dict__.get(_KEY)
    return call


def error_line(error: BaseException) -> str:
    """Return the type and message of an exception, and the call that it left."""
    line, call = f"{type(error).__name__}: {error}", hook_call_of(error)
    return line if call is None or str(call) in line else f"{line}; {call}"


@cache  # reads the metadata of every installed distribution
def _distribution(name: str, plugin: type) -> str:
    """Return the name and version of the distribution that offers a plugin."""
    package = plugin.__module__.partition(".")[0]
    for found in distributions():
        try:
            if "ascend_run." not in (found.read_text("entry_points.txt") or ""):
                continue
            for offer in found.entry_points:
                ours = offer.group.startswith("ascend_run.") and offer.name == name
                if ours and offer.module.partition(".")[0] == package:
                    return f"{found.name} {found.version}"
        except Exception:  # other distributions may be broken in any way
            continue
    return f"the module {plugin.__module__}"
