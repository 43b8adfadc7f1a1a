"""Whether two plugins can run together."""

from __future__ import annotations

from ascend_run.plugin_api import PluginResolutionError

from .kinds import Plugin
from .resolution import resolve


def exclusion(first: Plugin, second: Plugin) -> str | None:
    """Return why two plugins can never run together, and what to do; None if they can.

    Further plugins that one of them requires are no reason, since they can be enabled too.
    """
    names = (first.manifest.name, second.manifest.name)
    try:
        resolve(names, dict(zip(names, (first, second), strict=True)))
    except PluginResolutionError as error:
        for problem in error.problems:
            if all(f"'{name}'" in problem for name in names) and "requires" not in problem:
                return problem
    return None
