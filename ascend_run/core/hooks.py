"""Call hooks: combine the plugins' return values by hook kind, compile events to plain calls.

pluggy validates plugins against the hookspecs and keeps implementations in registration order; it
does not call them. Return values are collected while the run is built; an event is a generated
function that calls the listeners' bound methods. Exceptions are named (``hook_errors``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pluggy

from ascend_run.plugin_api import hookspecs
from ascend_run.plugin_api.errors import HookError
from ascend_run.plugin_api.hook_kinds import PROJECT, HookKind
from ascend_run.plugin_api.hookspecs import hook_points
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.plugin_api.manifest import EnabledPlugin
from ascend_run.types.declarations import Claim

from .events import compile_event
from .hook_errors import NamedErrors

T = TypeVar("T")
Watch = Callable[[str, Any, Any], None]
"""Called after each wrapper with the plugin name, its input and its output."""


class _Manager(pluggy.PluginManager):
    """Reads the specifications once, and seeks no hooks among the attributes that every object has:
    both take most of the time."""

    def parse_hookspec_opts(self, module_or_class: Any, name: str) -> Any:
        return _specification(module_or_class, name)

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        return None if name.startswith("__") else super().parse_hookimpl_opts(plugin, name)


@functools.cache
def _specification(namespace: Any, name: str) -> Any:
    return pluggy.PluginManager(PROJECT).parse_hookspec_opts(namespace, name)


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
        self._by_name = {plugin.manifest.name: plugin for plugin in self.plugins}
        self._platforms = {p.manifest.name for p in self.plugins if Claim.PLATFORM in claims_of(p)}
        self._points = hook_points()
        self._manager = _Manager(PROJECT)
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
            result = self._call(hook, implementation, arguments)
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

    def provide_builder(self, hook: str, **arguments: Any) -> Callable[..., Any] | None:
        """Return the function of :meth:`provide`; exceptions in it are named too."""
        name, build = self.provide_named(hook, **arguments)
        return None if build is None else self.naming(hook, name).around(build)

    def implements(self, hook: str) -> bool:
        """Return whether any enabled plugin implements a hook."""
        return bool(self._implementations(hook))

    def naming(self, hook: str, plugin: str) -> NamedErrors:
        """Return a context for calling what a plugin's hook returned: exceptions name both."""
        return NamedErrors(hook, self._by_name[plugin])

    def wrap(self, hook: str, inner: T, watch: Watch | None = None, /, **arguments: Any) -> T:
        """Apply every plugin's wrapper to ``inner``, the first plugin's innermost.

        Raises:
            HookError: A wrapper returned None.
            Exception: Whatever ``watch`` raises.
        """
        outer = inner
        for name, wrapper in self.wrappers(hook, **arguments):
            given, outer = outer, wrapper(outer)
            if watch is not None:
                watch(name, given, outer)
        return outer

    def wrappers(self, hook: str, **arguments: Any) -> Iterator[tuple[str, Callable[[Any], Any]]]:
        """Yield (plugin name, wrapper), innermost first.

        A plugin's hook is called only after the caller has applied the wrapper before it. A wrapper
        that returns None raises HookError.
        """
        self._expect(hook, HookKind.WRAPPER)
        for implementation in self._implementations(hook):
            wrapper, name = self._call(hook, implementation, arguments), implementation.plugin_name
            if wrapper is not None:
                yield name, self._checked(hook, name, wrapper)

    def composed(self, hook: str, **arguments: Any) -> Callable[[T], T]:
        """Return all wrappers as one function, to be applied many times. Hooks are called once.

        Raises:
            HookError: The returned function raises it if a wrapper returns None.
        """
        wrappers = [wrapper for _, wrapper in self.wrappers(hook, **arguments)]

        def compose(inner: T) -> T:
            outer = inner
            for wrapper in wrappers:
                outer = wrapper(outer)
            return outer

        return compose

    def contributions(self, hook: str, **arguments: Any) -> Iterator[tuple[str, Any]]:
        """Yield (plugin name, return value) in resolved order."""
        self._expect(hook, HookKind.CONTRIBUTION)
        for implementation in self._implementations(hook):
            result = self._call(hook, implementation, arguments)
            if result is not None:
                yield implementation.plugin_name, result

    def sequences(self, hook: str, **arguments: Any) -> Iterator[tuple[str, Sequence[Any]]]:
        """Yield :meth:`contributions`; raise HookError if one is not a sequence."""
        return self._of_type(Sequence, hook, arguments)

    def merge(self, hook: str, **arguments: Any) -> dict[str, Any]:
        """Merge the mappings that plugins return.

        Raises:
            HookError: Two plugins return the same key, or one returns anything but a mapping.
        """
        return {key: value for key, (_, value) in self.merge_named(hook, **arguments).items()}

    def merge_named(self, hook: str, **arguments: Any) -> dict[str, tuple[str, Any]]:
        """Return key -> (plugin name, value) of what ``merge`` returns."""
        results = self._of_type(Mapping, hook, arguments)
        items = ((plugin, item) for plugin, result in results for item in result.items())
        return _without_duplicates(hook, items)

    def collect(self, hook: str, key: Callable[[Any], str], **arguments: Any) -> list[Any]:
        """Concatenate the sequences that plugins return.

        Args:
            key: Returns an item's key, which must be unique.

        Raises:
            HookError: Two items have the same key, or a plugin returns anything but a sequence.
        """
        results = self.sequences(hook, **arguments)
        items = ((plugin, (key(item), item)) for plugin, result in results for item in result)
        return [item for _, item in _without_duplicates(hook, items).values()]

    def event(self, hook: str) -> Callable[..., None]:
        """Compile a callable that calls every listener; without listeners it is a no-op.

        It takes the event's arguments by keyword. Call this once, before the loop.
        """
        self._expect(hook, HookKind.LISTENER)
        listeners = self._implementations(hook)
        plugins = [self._by_name[listener.plugin_name] for listener in listeners]
        return compile_event(self._points[hook], listeners, plugins)

    def notify_all(self, hook: str, **arguments: Any) -> list[Exception]:
        """Call every listener even if some raise; return their exceptions."""
        self._expect(hook, HookKind.LISTENER)
        failed: list[Exception] = []
        for implementation in self._implementations(hook):
            try:
                self._call(hook, implementation, arguments)
            except Exception as error:
                failed.append(error)
        return failed

    def _of_type(
        self, kind: type[Any], hook: str, arguments: Mapping[str, Any]
    ) -> Iterator[tuple[str, Any]]:
        """Yield ``contributions``; raise HookError if one is not of this type."""
        for plugin, result in self.contributions(hook, **arguments):
            if not isinstance(result, kind) or isinstance(result, str):
                expected = f"a {kind.__name__.lower()}"
                with self.naming(hook, plugin):
                    raise HookError(
                        f"{hook}: '{plugin}' returned {result!r:.80}; expected {expected}"
                    )
            yield plugin, result

    def _call(
        self, hook: str, implementation: pluggy.HookImpl, arguments: Mapping[str, Any]
    ) -> Any:
        """Call one implementation with the arguments that it takes."""
        taken = [arguments[name] for name in implementation.argnames]
        with self.naming(hook, implementation.plugin_name):
            return implementation.function(*taken)

    def _checked(
        self, hook: str, plugin: str, wrapper: Callable[[Any], Any]
    ) -> Callable[[Any], Any]:
        """Return the wrapper with its exceptions named; None is one."""

        def wrap(inner: Any) -> Any:
            outer = wrapper(inner)
            if outer is None:
                raise HookError(f"{hook}: '{plugin}' returned None instead of a wrapped object")
            return outer

        return self.naming(hook, plugin).around(wrap)

    def _implementations(self, hook: str) -> list[pluggy.HookImpl]:
        """Return the implementations in registration order, which is the resolved order."""
        found: list[pluggy.HookImpl] = getattr(self._manager.hook, hook).get_hookimpls()
        return found

    def _is_platforms(self, implementation: pluggy.HookImpl) -> bool:
        return implementation.plugin_name in self._platforms

    def _expect(self, hook: str, kind: HookKind) -> None:
        actual = self._points[hook].kind
        assert actual is kind, f"{hook} is a {actual}, called as a {kind}"


def _without_duplicates(
    hook: str, items: Iterator[tuple[str, tuple[str, Any]]]
) -> dict[str, tuple[str, Any]]:
    """Build key -> (plugin, value) from (plugin, (key, value)); raise HookError on duplicates."""
    merged: dict[str, tuple[str, Any]] = {}
    for plugin, (key, value) in items:
        if key in merged:
            other = merged[key][0]
            raise HookError(f"{hook}: '{other}' and '{plugin}' both give {key!r}; enable one")
        merged[key] = plugin, value
    return merged
