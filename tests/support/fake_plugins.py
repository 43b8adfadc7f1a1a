"""Plugin classes created in a test, without a distribution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ascend_run.plugin_api import Manifest, hookimpl


def plugin(name: str, hooks: dict[str, Callable[..., Any]] | None = None, **manifest: Any) -> type:
    """Create a plugin class without options.

    Args:
        hooks: Hook name -> function with ``self``.
        manifest: Further arguments of its Manifest.
    """
    namespace: dict[str, Any] = {
        "manifest": Manifest(name=name, summary=f"the plugin {name}", **manifest)
    }
    for hook, function in (hooks or {}).items():
        namespace[hook] = hookimpl(function)
    return type(name.title().replace("-", ""), (), namespace)


def platform(name: str, hooks: dict[str, Callable[..., Any]] | None = None) -> type:
    """Create a platform plugin."""
    results = {"ascend_device": lambda self: None, **(hooks or {})}
    return plugin(name, results, platforms={})


def named(*plugins: type) -> dict[str, type]:
    """Map each plugin by each of its names, as a catalogue loads them."""
    return {
        name: found
        for found in plugins
        for name in (found.manifest.name, *found.manifest.aliases)  # type: ignore[attr-defined]
    }
