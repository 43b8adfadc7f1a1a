"""Call hooks: combine the plugins' return values by hook kind, compile events to plain calls.

pluggy validates plugins against the hookspecs and keeps implementations in registration order; it
does not call them. Return values are collected while the run is built; an event is a generated
function that calls the listeners' bound methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pluggy

from ascend_run.plugin_api import hookspecs
from ascend_run.plugin_api.errors import HookError
from ascend_run.plugin_api.hook_kinds import PROJECT, HookKind
from ascend_run.plugin_api.hook_points import HookPoint, hook_points
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.plugin_api.manifest import Claim, EnabledPlugin

T = TypeVar("T")
Watch = Callable[[str, Any, Any], None]
"""Called after each wrapper with the plugin name, its input and its output."""


class Hooks:
    """Call the hooks of one run's plugins.

    Args:
        plugins: Instances in resolved order, innermost first; each has a ``manifest``. Providers
            call the platform last, whatever its position.

    Raises:
        HookError: A plugin implements a hook that does not exist.
    """

    def __init__(self, plugins: Sequence[EnabledPlugin]) -> None:
        self.plugins = tuple(plugins)
        self._platforms = {p.manifest.name for p in self.plugins if Claim.PLATFORM in claims_of(p)}
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
        """Return the first value that is not None; the platform is called last."""
        return self.provide_named(hook, **arguments)[1]

    def provide_named(self, hook: str, **arguments: Any) -> tuple[str, Any]:
        """Return the plugin's name and its value, or ``("", None)`` without a value."""
        self._expect(hook, HookKind.PROVIDER)
        for implementation in sorted(self._implementations(hook), key=self._is_platforms):
            result = _call(implementation, arguments)
            if result is not None:
                return implementation.plugin_name, result
        return "", None

    def require(self, hook: str, **arguments: Any) -> Any:
        """Return the value of :meth:`provide`.

        Raises:
            HookError: No plugin returns a value.
        """
        return self.require_named(hook, **arguments)[1]

    def require_named(self, hook: str, **arguments: Any) -> tuple[str, Any]:
        """Return the name and value of :meth:`provide_named`.

        Raises:
            HookError: No plugin returns a value.
        """
        name, result = self.provide_named(hook, **arguments)
        if result is None:
            raise HookError(f"no enabled plugin provides {hook}; see: ascend-run plugins")
        return name, result

    def implements(self, hook: str) -> bool:
        """Return whether any enabled plugin implements a hook."""
        return bool(self._implementations(hook))

    def wrap(self, hook: str, inner: T, watch: Watch | None = None, /, **arguments: Any) -> T:
        """Apply every plugin's wrapper to ``inner``, the first plugin's innermost.

        Raises:
            HookError: A wrapper returned None.
            Exception: Whatever ``watch`` raises.
        """
        outer = inner
        for name, wrapper in self.wrappers(hook, **arguments):
            given, outer = outer, wrapper(outer)
            if outer is None:
                raise HookError(f"{hook}: '{name}' returned None instead of a wrapped object")
            if watch is not None:
                watch(name, given, outer)
        return outer

    def wrappers(self, hook: str, **arguments: Any) -> Iterator[tuple[str, Callable[[Any], Any]]]:
        """Yield (plugin name, wrapper), innermost first.

        A plugin's hook is called only after the caller has applied the wrapper before it.
        """
        self._expect(hook, HookKind.WRAPPER)
        for implementation in self._implementations(hook):
            wrapper = _call(implementation, arguments)
            if wrapper is not None:
                yield implementation.plugin_name, wrapper

    def composed(self, hook: str, **arguments: Any) -> Callable[[T], T]:
        """Return all wrappers as one function, to be applied many times. Hooks are called once.

        Raises:
            HookError: The returned function raises it if a wrapper returns None.
        """
        wrappers = [*self.wrappers(hook, **arguments)]

        def compose(inner: T) -> T:
            outer = inner
            for name, wrapper in wrappers:
                outer = wrapper(outer)
                if outer is None:
                    raise HookError(f"{hook}: '{name}' returned None instead of a wrapped object")
            return outer

        return compose

    def contributions(self, hook: str, **arguments: Any) -> Iterator[tuple[str, Any]]:
        """Yield (plugin name, return value) in resolved order."""
        self._expect(hook, HookKind.CONTRIBUTION)
        for implementation in self._implementations(hook):
            result = _call(implementation, arguments)
            if result is not None:
                yield implementation.plugin_name, result

    def merge(self, hook: str, **arguments: Any) -> dict[str, Any]:
        """Merge the mappings that plugins return.

        Raises:
            HookError: Two plugins return the same key.
        """
        results = self.contributions(hook, **arguments)
        items = ((plugin, item) for plugin, result in results for item in result.items())
        return _without_duplicates(hook, items)

    def collect(self, hook: str, key: Callable[[Any], str], **arguments: Any) -> list[Any]:
        """Concatenate the sequences that plugins return.

        Args:
            key: Returns an item's key, which must be unique.

        Raises:
            HookError: Two items have the same key.
        """
        results = self.contributions(hook, **arguments)
        items = ((plugin, (key(item), item)) for plugin, result in results for item in result)
        return list(_without_duplicates(hook, items).values())

    def event(self, hook: str) -> Callable[..., None]:
        """Compile a callable that calls every listener; without listeners it is a no-op.

        It takes the event's arguments by keyword. Call this once, before the loop.
        """
        self._expect(hook, HookKind.LISTENER)
        return _compile_chain(self._points[hook], self._implementations(hook))

    def notify_all(self, hook: str, **arguments: Any) -> list[tuple[str, Exception]]:
        """Call every listener even if some raise; return (plugin, error) of those that do."""
        self._expect(hook, HookKind.LISTENER)
        failed: list[tuple[str, Exception]] = []
        for implementation in self._implementations(hook):
            try:
                _call(implementation, arguments)
            except Exception as error:
                failed.append((implementation.plugin_name, error))
        return failed

    def _implementations(self, hook: str) -> list[pluggy.HookImpl]:
        """Return the implementations in registration order, which is the resolved order."""
        found: list[pluggy.HookImpl] = getattr(self._manager.hook, hook).get_hookimpls()
        return found

    def _is_platforms(self, implementation: pluggy.HookImpl) -> bool:
        return implementation.plugin_name in self._platforms

    def _expect(self, hook: str, kind: HookKind) -> None:
        actual = self._points[hook].kind
        assert actual is kind, f"{hook} is a {actual}, called as a {kind}"


def _call(implementation: pluggy.HookImpl, arguments: Mapping[str, Any]) -> Any:
    """Call one implementation with the arguments that it takes."""
    return implementation.function(*(arguments[name] for name in implementation.argnames))


def _without_duplicates(
    hook: str, items: Iterator[tuple[str, tuple[str, Any]]]
) -> dict[str, object]:
    """Build a mapping from (plugin, (key, value)) items; raise HookError on duplicate keys."""
    merged: dict[str, object] = {}
    owner: dict[str, str] = {}
    for plugin, (key, value) in items:
        if key in merged:
            raise HookError(f"{hook}: '{owner[key]}' and '{plugin}' both give {key!r}; enable one")
        merged[key], owner[key] = value, plugin
    return merged


def _compile_chain(
    point: HookPoint, implementations: Sequence[pluggy.HookImpl]
) -> Callable[..., None]:
    """Generate one function that calls each listener with the arguments it takes.

    A loop over (function, argument names) would build a dict per call. The generated source makes
    one plain call per listener.
    """
    scope: dict[str, Any] = {f"f{i}": impl.function for i, impl in enumerate(implementations)}
    calls = "; ".join(
        f"f{i}({', '.join(f'{name}={name}' for name in impl.argnames)})"
        for i, impl in enumerate(implementations)
    )
    source = f"def {point.name}({', '.join(point.arguments)}): {calls or 'pass'}"
    exec(source, scope)
    result: Callable[..., None] = scope[point.name]
    return result
