"""Find the minimal sets of features that cause the problems of a run, with its settings fixed.

Plugins that can be resolved together may still be incompatible with the settings of a run, or with
one another under these settings. Each such problem is traced to the features that cause it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice, product

import attrs

from ascend_run.plugin_api.error_text import listed
from ascend_run.plugin_api.errors import AscendRunError
from ascend_run.prepare.config.raw import COMMAND_LINE, RawConfig
from ascend_run.prepare.conflicts import Conflict, Conflicts
from ascend_run.prepare.prepare import resolve_run
from ascend_run.registry.discovery import Catalogue, discover

_MOST_TRIED = 64
"""Maximum number of sets of features to leave out that are tried."""

Names = frozenset[str]


def find_incompatibilities(error: AscendRunError, raw: RawConfig, world_size: int) -> Conflicts:
    """Return the sets of features that cause the problems of a run; problems that exist without any
    feature are left out.

    Args:
        error: The error of the run, with its problems.
    """
    known = discover()
    # By canonical name, once each, whatever the aliases that the user wrote.
    classes = known.load_each(raw.enable).classes
    enabled = frozenset(plugin.manifest.name for plugin in classes.values())

    def problems(features: Names) -> frozenset[str]:
        return _problems(raw, features, world_size, known)

    return trace(error.problems, enabled, problems)


def trace(
    found: Sequence[str], enabled: Names, problems: Callable[[Names], frozenset[str]]
) -> Conflicts:
    """Trace problems to the features that cause them.

    Args:
        found: Problems of the run with all enabled features.
        problems: Returns the problems of the run with a subset of the features.
    """
    conflicts = [
        Conflict(
            plugins=tuple(sorted(cause)),
            why=problem,
            way_out=f"change the setting, or leave out {listed(sorted(cause), 'or')}",
        )
        for problem in found
        if (cause := _cause(problem, enabled, problems))
    ]
    can_run = _can_run(conflicts, enabled, problems) if len(conflicts) == len(found) else ()
    return Conflicts(found=tuple(conflicts), can_run=can_run, explains=())


def _cause(problem: str, enabled: Names, problems: Callable[[Names], frozenset[str]]) -> Names:
    """A minimal set of features that causes the problem; empty if it exists without features."""
    if problem in problems(frozenset()):
        return frozenset()
    cause = enabled
    for name in sorted(enabled):
        if problem in problems(cause - {name}):
            cause -= {name}
    return cause


def _can_run(
    conflicts: Sequence[Conflict], enabled: Names, problems: Callable[[Names], frozenset[str]]
) -> tuple[tuple[str, ...], ...]:
    """The largest sets without any problem, among those that leave out one feature per conflict."""
    ways = islice(product(*(conflict.plugins for conflict in conflicts)), _MOST_TRIED)
    sets = sorted({enabled - {*way} for way in ways}, key=lambda s: (-len(s), sorted(s)))
    valid = [s for s in sets if not problems(s)]
    return tuple(tuple(sorted(s)) for s in valid if len(s) == len(valid[0]))


def _problems(
    raw: RawConfig, features: Iterable[str], world_size: int, known: Catalogue
) -> frozenset[str]:
    """Problems of the run with these features only, without the options of the other ones."""
    remaining = {*features}
    values = {
        key: given
        for key, given in raw.values.items()
        if not key.startswith("plugins.") or key.split(".")[1] in (remaining | _others(raw))
    }
    tried = attrs.evolve(raw, values=values, level=None, disable=())
    tried = tried.replacing(COMMAND_LINE, enable=sorted(remaining))
    try:
        return frozenset(resolve_run(tried, known, world_size).problems())
    except AscendRunError as error:
        return frozenset(error.problems or [error.headline])


def _others(raw: RawConfig) -> set[str]:
    """Plugins of a run that are not features."""
    return {raw.platform, raw.task, raw.family}
