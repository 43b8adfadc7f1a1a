"""One run's hooks: ask the plugins, combine their answers by kind, compile events to plain calls.

The hot path never goes through pluggy: what a hook answers while the run is being built is what
runs, and an event is a chain of the listeners' own bound methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pluggy

from ascend_run.plugin_api import hookspecs
from ascend_run.plugin_api.errors import HookError
from ascend_run.plugin_api.hook_points import HookPoint, hook_points
from ascend_run.plugin_api.hookspecs import PROJECT, HookKind
from ascend_run.plugin_api.manifest import Claim

T = TypeVar("T")


class Hooks:
    """The plugins of one run behind the hook points.

    Args:
        plugins: Instances in resolved order, innermost first; each has a ``manifest``. The
            platform is asked last by providers, whatever its place.

    Raises:
        HookError: A plugin implements a hook that does not exist.
    """

    def __init__(self, plugins: Sequence[Any]) -> None:
        self.plugins = tuple(plugins)
        self._points = hook_points()
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(hookspecs)
        # pluggy calls the last registered first.
        for plugin in reversed(self.plugins):
            self._manager.register(plugin, name=plugin.manifest.name)
        try:
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            headline = "a plugin implements a hook that does not exist"
            raise HookError(headline, [str(error)]) from None

    def provide(self, hook: str, **arguments: Any) -> Any:
        """The one plugin's answer, or the platform's, or None."""
        self._expect(hook, HookKind.PROVIDER)
        last = [impl for impl in self._implementations(hook) if _is_platform(impl.plugin)]
        first = [impl for impl in self._implementations(hook) if not _is_platform(impl.plugin)]
        for implementation in (*first, *last):
            answer = _call(implementation, arguments)
            if answer is not None:
                return answer
        return None

    def require(self, hook: str, **arguments: Any) -> Any:
        """As ``provide``; no answer is an error.

        Raises:
            HookError: Nobody answered.
        """
        answer = self.provide(hook, **arguments)
        if answer is None:
            raise HookError(f"no enabled plugin answers {hook}; see: ascend-run plugins")
        return answer

    def wrappers(self, hook: str, **arguments: Any) -> list[Callable[[Any], Any]]:
        """The functions from inner to outer, innermost first."""
        self._expect(hook, HookKind.WRAPPER)
        answers = (
            _call(implementation, arguments) for implementation in self._implementations(hook)
        )
        return [answer for answer in answers if answer is not None]

    def implements(self, hook: str) -> bool:
        """Whether any enabled plugin implements a hook."""
        return bool(self._implementations(hook))

    def wrap(self, hook: str, inner: T, **arguments: Any) -> T:
        """``inner`` inside every wrapper, the first plugin's innermost."""
        outer = inner
        for wrapper in self.wrappers(hook, **arguments):
            outer = wrapper(outer)
            if outer is None:
                raise HookError(
                    f"{hook}: {_owner(wrapper)} answered None in place of what it wraps"
                )
        return outer

    def contributions(self, hook: str, **arguments: Any) -> Iterator[tuple[str, Any]]:
        """(plugin name, answer) in resolved order."""
        self._expect(hook, HookKind.CONTRIBUTION)
        for implementation in self._implementations(hook):
            answer = _call(implementation, arguments)
            if answer is not None:
                yield implementation.plugin_name, answer

    def merge(self, hook: str, **arguments: Any) -> dict[str, Any]:
        """One mapping from all answers that are mappings.

        Raises:
            HookError: Two plugins give the same key.
        """
        merged: dict[str, Any] = {}
        owner: dict[str, str] = {}
        for plugin, answer in self.contributions(hook, **arguments):
            for key, value in answer.items():
                if key in merged:
                    raise HookError(
                        f"{hook}: '{owner[key]}' and '{plugin}' both give {key!r}; enable one"
                    )
                merged[key], owner[key] = value, plugin
        return merged

    def event(self, hook: str) -> Callable[..., None]:
        """A callable that tells every listener; a no-op where there is none.

        It takes the event's arguments by keyword, and is compiled once: build it before the loop.
        """
        self._expect(hook, HookKind.LISTENER)
        return _compile_chain(self._points[hook], self._implementations(hook))

    def _implementations(self, hook: str) -> list[pluggy.HookImpl]:
        """In resolved order: pluggy lists them in the order of registration, which is reversed."""
        return list(reversed(getattr(self._manager.hook, hook).get_hookimpls()))

    def _expect(self, hook: str, kind: HookKind) -> None:
        actual = self._points[hook].kind
        assert actual is kind, f"{hook} is a {actual}, asked as a {kind}"


def _is_platform(plugin: Any) -> bool:
    return Claim.PLATFORM in plugin.manifest.claims


def _call(implementation: pluggy.HookImpl, arguments: Mapping[str, Any]) -> Any:
    """Ask one plugin, with just the arguments that it takes."""
    return implementation.function(*(arguments[name] for name in implementation.argnames))


def _compile_chain(
    point: HookPoint, implementations: Sequence[pluggy.HookImpl]
) -> Callable[..., None]:
    """One generated function that calls each listener with just the arguments it takes.

    A loop over (function, argument names) pairs would build a dict a call; generated source costs
    one plain call a listener.
    """
    scope: dict[str, Any] = {f"f{i}": impl.function for i, impl in enumerate(implementations)}
    calls = "; ".join(
        f"f{i}({', '.join(f'{name}={name}' for name in impl.argnames)})"
        for i, impl in enumerate(implementations)
    )
    source = f"def {point.name}({', '.join(point.arguments)}): {calls or 'pass'}"
    exec(source, scope)
    return scope[point.name]


def _owner(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)}"
