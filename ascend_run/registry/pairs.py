"""Whether two plugins may run together, whatever the rest of the run."""

from __future__ import annotations

from ascend_run.plugin_api import PluginResolutionError

from .kinds import Plugin
from .resolution import resolve


def exclusion(first: Plugin, second: Plugin) -> str | None:
    """Why two plugins cannot run together, with the way out; None where they can.

    What one of them requires beside the other is no reason: it can be had.
    """
    names = (first.manifest.name, second.manifest.name)
    try:
        resolve(names, dict(zip(names, (first, second), strict=True)))
    except PluginResolutionError as error:
        for problem in error.problems:
            if all(f"'{name}'" in problem for name in names) and "requires" not in problem:
                return problem
    return None
