"""Plugin classes made on the spot, for what needs no distribution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ascend_run.plugin_api import Claim, Manifest, hookimpl


def plugin(name: str, hooks: dict[str, Callable[..., Any]] | None = None, **manifest: Any) -> type:
    """A plugin class without options.

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
    """A platform plugin."""
    return plugin(name, hooks, claims=(Claim.PLATFORM,), platforms={})


def named(*plugins: type) -> dict[str, type]:
    """Each plugin under each of its names, as a catalogue loads them."""
    return {
        name: found
        for found in plugins
        for name in (found.manifest.name, *found.manifest.aliases)  # type: ignore[attr-defined]
    }
