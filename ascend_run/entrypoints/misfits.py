"""Which features a refused run's problems come from: minimal sets, the settings being as they are.

Plugins that resolution allows together may still not go with the settings of a run, or with one
another under them. Here each such problem is traced to the features without which it would not be
there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice, product

import attrs

from ascend_run.core.config.raw import COMMAND_LINE, RawConfig
from ascend_run.plugin_api.errors import AscendRunError
from ascend_run.registry.discovery import Catalogue, discover

from .conflicts import Conflict, Conflicts, listed
from .planning import run_problems_of

_MOST_TRIED = 64
"""Ways to leave features out that are tried."""

Names = frozenset[str]


def misfits(error: AscendRunError, raw: RawConfig, world_size: int) -> Conflicts:
    """The problems of a refused run as sets of features; a problem that is there without any
    feature is in none.

    Args:
        error: What refused the run, with its problems.
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
    """The same for any kind of run.

    Args:
        found: Problems of the run with all enabled features.
        problems: Those of the run with some of them.
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
    """Features that have the problem, and without any one of which it is not there; none where it
    is there without features."""
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
    """The largest sets that have no problem at all, among those that hit each conflict once."""
    ways = islice(product(*(conflict.plugins for conflict in conflicts)), _MOST_TRIED)
    sets = sorted({enabled - {*way} for way in ways}, key=lambda s: (-len(s), sorted(s)))
    sound = [s for s in sets if not problems(s)]
    return tuple(tuple(sorted(s)) for s in sound if len(s) == len(sound[0]))


def _problems(
    raw: RawConfig, features: Iterable[str], world_size: int, known: Catalogue
) -> frozenset[str]:
    """What is wrong with the run with these features; the options of others are left out too."""
    kept = {*features}
    values = {
        key: given
        for key, given in raw.values.items()
        if not key.startswith("plugins.") or key.split(".")[1] in (kept | _others(raw))
    }
    tried = attrs.evolve(raw, values=values, level=None, disable=())
    tried = tried.replacing(COMMAND_LINE, enable=sorted(kept))
    try:
        return frozenset(run_problems_of(tried, world_size, known))
    except AscendRunError as error:
        return frozenset(error.problems or [error.headline])


def _others(raw: RawConfig) -> set[str]:
    """Plugins of a run that are no features."""
    return {raw.platform, raw.task, raw.family}
