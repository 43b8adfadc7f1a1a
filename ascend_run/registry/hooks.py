"""Check implementations and claims against the hooks of the API."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from ascend_run.plugin_api.errors import HookError
from ascend_run.plugin_api.hookspecs import hook_points
from ascend_run.plugin_api.implementations import claims_of, implementations

from .kinds import Plugin

_REORDERING = ("tryfirst", "trylast", "wrapper", "hookwrapper")


def check_hooks(plugins: Sequence[Plugin]) -> None:
    """Raise if an implementation does not match the hook specifications.

    Raises:
        HookError: Names every such implementation and the nearest hook.
    """
    problems = [problem for plugin in plugins for problem in hook_problems(plugin)]
    if problems:
        raise HookError("a plugin does not match the hooks of the API", problems)


def hook_problems(plugin: Plugin) -> list[str]:
    """Return a message for each implementation that would never be called, or not in the order that
    ``plan`` shows, for each claim in the manifest that a hook implies, and for an order that is
    declared relative to the plugin itself."""
    points = hook_points()
    name = plugin.manifest.name
    makers = {point.claim: point.name for point in points.values() if point.claim}
    problems = [
        f"'{name}' has Claim.{claim.name} in its manifest; only implementing {makers[claim]} makes "
        f"the claim '{claim}': delete it from the manifest's claims"
        for claim in plugin.manifest.claims
        if claim in makers
    ]
    problems += [
        f"'{name}' is declared to be inside or outside of Claim.{claim.name}, which it makes "
        "itself: delete it there"
        for claim in claims_of(plugin)
        if claim in (*plugin.manifest.inside, *plugin.manifest.outside)
    ]
    for implementation in implementations(plugin).values():
        hook = implementation.hook
        if hook not in points:
            near = difflib.get_close_matches(hook, points, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            problems.append(f"'{name}' implements {hook}, which is not a hook{hint}")
            continue
        for argument in implementation.arguments:
            if argument not in points[hook].arguments:
                known = ", ".join(points[hook].arguments) or "none"
                problems.append(
                    f"'{name}' implements {hook} with the argument {argument!r}; its arguments "
                    f"are: {known}"
                )
        for option in _REORDERING:
            if implementation.options.get(option):
                problems.append(
                    f"'{name}' marks {hook} with {option}; declare its position by the manifest's "
                    "'after', 'inside' or 'outside'"
                )
    return problems
