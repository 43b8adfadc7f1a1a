"""One run's hooks: ask the plugins, combine their answers by kind, compile events to plain calls.

pluggy validates the plugins against the specifications and keeps the implementations in the order
of registration; it calls nothing. What a hook answers while the run is being built is what runs,
and an event is a chain of the listeners' own bound methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pluggy

from ascend_run.plugin_api import hookspecs
from ascend_run.plugin_api.errors import HookError
from ascend_run.plugin_api.hook_kinds import PROJECT, HookKind
from ascend_run.plugin_api.hook_points import HookPoint, hook_points
from ascend_run.plugin_api.manifest import Claim

T = TypeVar("T")
Watch = Callable[[str, Any, Any], None]
"""Told of one step of wrapping: the plugin, what it was given, what it answered."""


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
        for plugin in self.plugins:
            self._manager.register(plugin, name=plugin.manifest.name)
        try:
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            headline = "a plugin implements a hook that does not exist"
            raise HookError(headline, [str(error)]) from None

    def provide(self, hook: str, **arguments: Any) -> Any:
        """The one plugin's answer, or the platform's, or None."""
        return self.provide_named(hook, **arguments)[1]

    def provide_named(self, hook: str, **arguments: Any) -> tuple[str, Any]:
        """As ``provide``, with the name of the plugin that answered; none is an empty name."""
        self._expect(hook, HookKind.PROVIDER)
        for implementation in sorted(self._implementations(hook), key=_is_platforms):
            answer = _call(implementation, arguments)
            if answer is not None:
                return implementation.plugin_name, answer
        return "", None

    def require(self, hook: str, **arguments: Any) -> Any:
        """As ``provide``; no answer is an error.

        Raises:
            HookError: Nobody answered.
        """
        return self.require_named(hook, **arguments)[1]

    def require_named(self, hook: str, **arguments: Any) -> tuple[str, Any]:
        """As ``provide_named``; no answer is an error.

        Raises:
            HookError: Nobody answered.
        """
        name, answer = self.provide_named(hook, **arguments)
        if answer is None:
            raise HookError(f"no enabled plugin answers {hook}; see: ascend-run plugins")
        return name, answer

    def implements(self, hook: str) -> bool:
        """Whether any enabled plugin implements a hook."""
        return bool(self._implementations(hook))

    def wrap(self, hook: str, inner: T, watch: Watch | None = None, /, **arguments: Any) -> T:
        """``inner`` inside every wrapper, the first plugin's innermost.

        Raises:
            HookError: A wrapper answered None; or what ``watch`` raises.
        """
        self._expect(hook, HookKind.WRAPPER)
        outer = inner
        for implementation in self._implementations(hook):
            wrapper: Callable[[T], T] | None = _call(implementation, arguments)
            if wrapper is None:
                continue
            given, outer = outer, wrapper(outer)
            if outer is None:
                raise HookError(
                    f"{hook}: '{implementation.plugin_name}' answered None in place of what it "
                    "wraps"
                )
            if watch is not None:
                watch(implementation.plugin_name, given, outer)
        return outer

    def composed(self, hook: str, **arguments: Any) -> Callable[[T], T]:
        """All wrappers as one function, for what is wrapped again and again; plugins are asked
        once.

        Raises:
            HookError: From the function, where a wrapper answers None.
        """
        self._expect(hook, HookKind.WRAPPER)
        asked = [(i.plugin_name, _call(i, arguments)) for i in self._implementations(hook)]
        wrappers = [(name, wrapper) for name, wrapper in asked if wrapper is not None]

        def compose(inner: T) -> T:
            outer = inner
            for name, wrapper in wrappers:
                outer = wrapper(outer)
                if outer is None:
                    raise HookError(f"{hook}: '{name}' answered None in place of what it wraps")
            return outer

        return compose

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
        answers = self.contributions(hook, **arguments)
        items = ((plugin, item) for plugin, answer in answers for item in answer.items())
        return _without_duplicates(hook, items)

    def collect(self, hook: str, key: Callable[[Any], str], **arguments: Any) -> list[Any]:
        """One list from all answers that are sequences; ``key`` is what two may not share.

        Raises:
            HookError: Two items have one key.
        """
        answers = self.contributions(hook, **arguments)
        items = ((plugin, (key(item), item)) for plugin, answer in answers for item in answer)
        return list(_without_duplicates(hook, items).values())

    def event(self, hook: str) -> Callable[..., None]:
        """A callable that tells every listener; a no-op where there is none.

        It takes the event's arguments by keyword, and is compiled once: build it before the loop.
        """
        self._expect(hook, HookKind.LISTENER)
        return _compile_chain(self._points[hook], self._implementations(hook))

    def tell_all(self, hook: str, **arguments: Any) -> list[tuple[str, Exception]]:
        """Tell every listener of an event, whatever others raise; (plugin, error) of those."""
        self._expect(hook, HookKind.LISTENER)
        failed: list[tuple[str, Exception]] = []
        for implementation in self._implementations(hook):
            try:
                _call(implementation, arguments)
            except Exception as error:
                failed.append((implementation.plugin_name, error))
        return failed

    def _implementations(self, hook: str) -> list[pluggy.HookImpl]:
        """In the order of registration, which is the resolved one."""
        found: list[pluggy.HookImpl] = getattr(self._manager.hook, hook).get_hookimpls()
        return found

    def _expect(self, hook: str, kind: HookKind) -> None:
        actual = self._points[hook].kind
        assert actual is kind, f"{hook} is a {actual}, asked as a {kind}"


def _is_platforms(implementation: pluggy.HookImpl) -> bool:
    return Claim.PLATFORM in implementation.plugin.manifest.claims


def _call(implementation: pluggy.HookImpl, arguments: Mapping[str, Any]) -> Any:
    """Ask one plugin, with just the arguments that it takes."""
    return implementation.function(*(arguments[name] for name in implementation.argnames))


def _without_duplicates(hook: str, items: Iterator[tuple[str, tuple[str, Any]]]) -> dict[str, Any]:
    """One mapping from (plugin, (key, value))."""
    merged: dict[str, Any] = {}
    owner: dict[str, str] = {}
    for plugin, (key, value) in items:
        if key in merged:
            raise HookError(f"{hook}: '{owner[key]}' and '{plugin}' both give {key!r}; enable one")
        merged[key], owner[key] = value, plugin
    return merged


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
